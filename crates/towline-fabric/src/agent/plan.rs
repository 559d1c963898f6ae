//! What a transfer request means: checked, merged into runs, cut into slices. Pure.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use towline_wire::blocks::{BlockListError, Run, runs};
use towline_wire::card::AgentCard;
use towline_wire::control::NOTIFY_BYTES_MAX;
use towline_wire::frame::{EXTENTS_MAX, PAYLOAD_BYTES_MAX};
use towline_wire::id::RegionId;
use towline_wire::receipt::Op;

use super::transfer::TransferRequest;
use crate::error::TransferError;
use crate::transport::Lease;

/// A request that can be posted, once or many times.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) op: Op,
    pub(crate) region: RegionId,
    pub(crate) lease: Lease,
    pub(crate) runs: Arc<[Run]>,
    /// Which runs make up each slice.
    pub(crate) cuts: Vec<Range<usize>>,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    pub(crate) descriptors: u64,
    /// Pieces left after merging, before long ones are cut for slices.
    pub(crate) descriptors_merged: u64,
    pub(crate) deadline: Duration,
    pub(crate) notify: Option<Vec<u8>>,
    /// How long planning took.
    pub(crate) prepare: Duration,
}

/// Checks a request against the peer's card and plans it.
///
/// # Errors
/// [`TransferError`] for everything that can be told without asking the peer.
pub(crate) fn plan(request: &TransferRequest, card: &AgentCard) -> Result<Plan, TransferError> {
    let TransferRequest {
        op,
        local,
        local_blocks,
        remote_region,
        remote_blocks,
        lease,
        deadline,
        notify,
        ..
    } = request;
    let region =
        card.region(*remote_region).ok_or(TransferError::UnknownRegion { region: *remote_region })?;
    if *op == Op::Write && !region.peer_writable {
        return Err(TransferError::NotWritable { what: format!("the peer's region {remote_region}") });
    }
    if *op == Op::Read && !local.is_writable() {
        return Err(TransferError::NotWritable { what: "the local memory, which is a peer's,".into() });
    }
    if let Some(length) = notify.as_ref().map(Vec::len).filter(|length| *length > NOTIFY_BYTES_MAX) {
        return Err(TransferError::NotifyTooLong { length, max: NOTIFY_BYTES_MAX });
    }
    local_blocks.validate(local.len()).map_err(|error| refuse("local", error))?;
    remote_blocks.validate(region.len_bytes).map_err(|error| refuse("remote", error))?;
    let runs: Arc<[Run]> = runs(local_blocks, remote_blocks, PAYLOAD_BYTES_MAX)?.into();
    let lists = [local_blocks, remote_blocks];
    Ok(Plan {
        op: *op,
        region: *remote_region,
        lease: *lease,
        cuts: cut(&runs),
        descriptors_merged: pieces(&runs),
        runs,
        bytes: remote_blocks.bytes(),
        blocks: remote_blocks.indices.len() as u64,
        descriptors: lists
            .iter()
            .map(|list| (list.bases.len() * list.indices.len()) as u64)
            .max()
            .unwrap_or(0),
        deadline: *deadline,
        notify: notify.clone(),
        prepare: Duration::ZERO,
    })
}

fn refuse(side: &str, error: BlockListError) -> TransferError {
    match error {
        BlockListError::Outside { .. } => TransferError::OutOfRange { detail: format!("{side}: {error}") },
        error => TransferError::Invalid(error),
    }
}

/// Runs that do not go on where the one before ended, on both sides.
fn pieces(runs: &[Run]) -> u64 {
    let goes_on = |pair: &&[Run]| match pair {
        [a, b] => a.local + a.len == b.local && a.remote + a.len == b.remote,
        _ => false,
    };
    (runs.len() - runs.windows(2).filter(goes_on).count()) as u64
}

/// Consecutive runs, as many as fit in one slice. Each run alone fits.
fn cut(runs: &[Run]) -> Vec<Range<usize>> {
    let (mut cuts, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (index, run) in runs.iter().enumerate() {
        if index > start && (bytes + run.len > PAYLOAD_BYTES_MAX || index - start == EXTENTS_MAX) {
            cuts.push(start..index);
            (start, bytes) = (index, 0);
        }
        bytes += run.len;
    }
    if start < runs.len() {
        cuts.push(start..runs.len());
    }
    cuts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cuts_cover_every_run_once_within_bounds(lens in prop::collection::vec(1..=PAYLOAD_BYTES_MAX, 0..60)) {
            let runs: Vec<Run> = lens.iter().map(|len| Run { local: 0, remote: 0, len: *len }).collect();
            let cuts = cut(&runs);
            let covered: Vec<usize> = cuts.iter().cloned().flatten().collect();
            prop_assert_eq!(covered, (0..runs.len()).collect::<Vec<_>>());
            for range in cuts {
                prop_assert!(runs[range].iter().map(|run| run.len).sum::<u64>() <= PAYLOAD_BYTES_MAX);
            }
        }
    }

    #[test]
    fn a_piece_that_was_cut_counts_once() {
        let run = |local, remote, len| Run { local, remote, len };
        assert_eq!(pieces(&[]), 0);
        assert_eq!(pieces(&[run(0, 8, 4), run(4, 12, 4), run(8, 20, 4), run(20, 24, 4)]), 3);
    }

    #[test]
    fn many_small_runs_are_cut_by_count() {
        let runs = vec![Run { local: 0, remote: 0, len: 1 }; 2 * EXTENTS_MAX + 1];
        assert_eq!(
            cut(&runs).iter().map(ExactSizeIterator::len).collect::<Vec<_>>(),
            [EXTENTS_MAX, EXTENTS_MAX, 1]
        );
    }
}
