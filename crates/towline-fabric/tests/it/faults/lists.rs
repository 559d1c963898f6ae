//! Block lists that no correct caller posts.

use towline_fabric::{RegionOptions, TransferError, TransferRequest};
use towline_wire::blocks::BlockList;
use towline_wire::receipt::{Op, TransportKind};

use super::ends::{self, GOOD, WRONG_BYTES};
use super::fault::ListFlaw;
use super::pool::{BLOCK, BLOCKS, BYTES, Pool, fill};
use super::scene::Other;
use crate::support::*;

const SEED: u64 = 9;

/// Posts lists with that flaw, one after the other; how each ended.
pub(super) fn play(flaw: ListFlaw, kind: TransportKind) -> Vec<&'static str> {
    let pair = Pair::over(kind, BYTES, RegionOptions::default());
    fill(pair.region.memory(), SEED);
    let pool = Pool::new();
    if flaw == ListFlaw::Overlapping {
        return vec![overlap(&pair, &pool)];
    }
    pool.poison();
    let ends = lists(flaw).into_iter().map(|(local, remote)| {
        let lent = pool.lend();
        let request = pair.request(Op::Read, pool.memory(), (local, remote));
        let posted = pair.peer.transfer(TransferRequest { hold: Some(lent.hold()), ..request });
        drop(lent);
        let outcome = posted.and_then(|mut transfer| transfer.wait(PATIENCE).expect("an outcome in time"));
        eventually("every block is back", || pool.is_whole());
        outcome.map_or_else(|error: TransferError| ends::of_transfer(&error), |_| GOOD)
    });
    let ends: Vec<_> = ends.collect();
    assert!(pool.is_poisoned(), "something was touched");
    assert!(pair.peer.is_open() && pair.reader.stats().transfers == 0);
    Other::new().serves(&pair.reader, kind);
    ends
}

fn lists(flaw: ListFlaw) -> Vec<(BlockList, BlockList)> {
    let good = || blocks(BLOCK, [0]);
    let shaped = |bases: Vec<u64>, block_bytes, stride, indices: Vec<u32>| BlockList {
        group: 0,
        bases,
        block_bytes,
        stride,
        indices,
    };
    let on_both_sides = |bad: BlockList| [(good(), bad.clone()), (bad, good())];
    let bad = match flaw {
        ListFlaw::Outside => vec![
            blocks(BLOCK, [BLOCKS]),
            shaped(vec![1], BLOCK, BLOCK, vec![BLOCKS - 1]),
            shaped(vec![BYTES], BLOCK, BLOCK, vec![0]),
        ],
        ListFlaw::Overflowing => vec![
            shaped(vec![u64::MAX - BLOCK + 1], BLOCK, BLOCK, vec![0]),
            shaped(vec![u64::MAX], BLOCK, BLOCK, vec![u32::MAX]),
            shaped(vec![0], BLOCK, u64::MAX, vec![2]),
            shaped(vec![0], u64::MAX, u64::MAX, vec![0]),
        ],
        ListFlaw::ZeroLength => vec![shaped(vec![0], 0, 0, vec![0]), shaped(vec![0], 0, BLOCK, vec![0, 1])],
        ListFlaw::Empty => return vec![(blocks(BLOCK, []), blocks(BLOCK, []))],
        ListFlaw::Overlapping => Vec::new(),
    };
    bad.into_iter().flat_map(on_both_sides).collect()
}

/// Two blocks of the owner into one of ours, and a third beside it.
fn overlap(pair: &Pair, pool: &Pool) -> &'static str {
    pool.poison();
    let lists = (blocks(BLOCK, [3, 3, 5]), blocks(BLOCK, [0, 1, 2]));
    let request = pair.request(Op::Read, pool.memory(), lists);
    let receipt = pair.peer.transfer(request).unwrap().wait(PATIENCE).unwrap().unwrap();
    assert_eq!(receipt.bytes, 3 * BLOCK);
    let (ours, theirs) = (contents(pool.memory()), contents(pair.region.memory()));
    let block = |bytes: &[u8], index: u64| {
        let [start, len] = [index * BLOCK, BLOCK].map(|at| usize::try_from(at).unwrap());
        bytes[start..start + len].to_vec()
    };
    let [first, second] = [0, 1].map(|index| block(&theirs, index));
    let mixed = block(&ours, 3).into_iter().zip(first.into_iter().zip(second));
    let is_of_a_source = mixed.into_iter().all(|(byte, (a, b))| byte == a || byte == b);
    let is_right = block(&ours, 5) == block(&theirs, 2);
    let untouched = (0..BLOCKS).filter(|index| ![3, 5].contains(index));
    let is_poisoned = untouched.into_iter().all(|index| pool.is_block_poisoned(index));
    if is_of_a_source && is_right && is_poisoned { GOOD } else { WRONG_BYTES }
}
