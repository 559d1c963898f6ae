//! What a rank reads from which ranks of the other engine, part by part: the planner's answer, as lists for transfers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use towline_wire::blocks::{BASES_MAX, BlockList, Run};
use towline_wire::handoff::HandoffError;
use towline_wire::reshard::{ListPair, PIECES_MAX, Request, Side, Steps, plan};

use super::links::RankPull;

/// What is read from one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// The rank's number.
    pub(super) rank: u32,
    /// By part; only parts of which it has something that is wanted.
    pub(super) parts: BTreeMap<u32, Vec<ListPair>>,
}

impl Route {
    /// All of some parts.
    pub(super) fn lists(&self, parts: Range<u32>) -> impl Iterator<Item = &ListPair> {
        self.parts.range(parts).flat_map(|(_, lists)| lists)
    }

    /// Blocks of the rank that are read whole or in pieces, each counted once, however many parts it is read in.
    pub(super) fn blocks(&self) -> u64 {
        let lists = self.parts.values().flatten();
        let blocks: BTreeSet<(u16, u32)> = lists
            .flat_map(|pair| pair.remote.indices.iter().map(|index| (pair.remote.group, *index)))
            .collect();
        blocks.len() as u64
    }
}

/// Plans a pull. There is always a route: of whom nothing is needed, one is still told that the lease is not.
///
/// # Errors
/// [`HandoffError::Invalid`] with the planner's reason.
pub(super) fn routes(pull: &RankPull<'_>) -> Result<Vec<Route>, HandoffError> {
    let RankPull { ticket, layout, sharding, pool, tokens, .. } = pull;
    let parts = &ticket.part_layers;
    let (theirs, ranks, ours) = (ticket.sharding(), ticket.pools(), [pool.clone()]);
    let source = Side { layout: ticket.layout.as_ref().unwrap_or(layout), sharding: &theirs, ranks: &ranks };
    let planned = plan(&Request {
        source,
        destination: Side { layout, sharding, ranks: &ours },
        tokens: tokens.clone(),
        // All at once moves whole blocks where both sides keep them alike.
        steps: if parts.count() == 1 { Steps::Whole } else { Steps::ByLayer },
        rotation: ticket.ranks.first().map_or(0, |rank| u32::try_from(rank.lease.0 & 0xffff).unwrap_or(0)),
        pieces_max: PIECES_MAX,
    });
    let planned = planned.map_err(|error| HandoffError::Invalid {
        detail: format!("the ticket's KV cannot be brought into this engine: {error}"),
    })?;
    let mut routes: BTreeMap<u32, Route> = BTreeMap::new();
    for transfer in planned.transfers {
        let part = transfer.layer.and_then(|layer| parts.part_of(layer)).unwrap_or(0);
        let rank = transfer.source;
        let route = routes.entry(rank).or_insert_with(|| Route { rank, parts: BTreeMap::new() });
        let lists = route.parts.entry(part).or_default();
        lists.extend(transfer.lists);
        lists.extend(in_lists(&transfer.runs));
    }
    if routes.is_empty() {
        // Nothing to move; the receipt of an empty transfer says over which wire.
        let rank = pool.rank % u32::try_from(ranks.len()).unwrap_or(1).max(1);
        routes.insert(rank, Route { rank, parts: BTreeMap::from([(0, vec![nothing()])]) });
    }
    Ok(routes.into_values().collect())
}

/// Runs of equal length make a list: their starts are its bases, of one block each.
fn in_lists(runs: &[Run]) -> Vec<ListPair> {
    let mut by_len: BTreeMap<u64, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        by_len.entry(run.len).or_default().push(run);
    }
    let chunks = by_len.iter().flat_map(|(len, runs)| runs.chunks(BASES_MAX).map(move |chunk| (*len, chunk)));
    let list = |bases, len| BlockList { group: 0, bases, block_bytes: len, stride: len, indices: vec![0] };
    chunks
        .map(|(len, chunk)| ListPair {
            local: list(chunk.iter().map(|run| run.local).collect(), len),
            remote: list(chunk.iter().map(|run| run.remote).collect(), len),
        })
        .collect()
}

fn nothing() -> ListPair {
    let list = BlockList { group: 0, bases: vec![0], block_bytes: 1, stride: 1, indices: Vec::new() };
    ListPair { local: list.clone(), remote: list }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_equal_length_become_lists_of_as_many_bases_as_a_list_may_have() {
        let runs: Vec<Run> = (0..5000u64)
            .map(|at| Run { local: at * 100, remote: at * 50, len: if at == 7 { 3 } else { 8 } })
            .collect();
        let lists = in_lists(&runs);
        let shape = |pair: &ListPair| (pair.local.block_bytes, pair.local.bases.len(), pair.remote.bases[0]);
        assert_eq!(
            lists.iter().map(shape).collect::<Vec<_>>(),
            [(3, 1, 350), (8, 4096, 0), (8, 903, 4097 * 50)]
        );
        assert!(lists.iter().all(|pair| pair.local.bytes() == pair.remote.bytes()));
    }
}
