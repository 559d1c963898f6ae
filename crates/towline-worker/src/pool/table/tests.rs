//! What must hold of the bookkeeping after any sequence of operations.

use std::collections::HashMap;

use proptest::prelude::*;
use towline_wire::prefix::PrefixHasher;

use super::*;

fn keys(prompt: u32, count: usize) -> Vec<PrefixKey> {
    let tokens: Vec<u32> = (0..).map(|i| prompt * 1000 + i).take(count * 4).collect();
    PrefixHasher::new("f", "").keys(&tokens, 4)
}

fn table(blocks: u32) -> BlockTable {
    BlockTable::new(blocks, PrefixCache::On, BlockOrder::Sequential)
}

/// References that the test holds, against what the table says, and every block in exactly one state.
fn check(table: &BlockTable, held: &[Vec<u32>]) {
    let mut expected: HashMap<u32, u32> = HashMap::new();
    for id in held.iter().flatten() {
        *expected.entry(*id).or_default() += 1;
    }
    let mut idle = Vec::new();
    let mut at = table.oldest;
    while at != NONE {
        idle.push(at);
        at = table.entry(at).newer;
    }
    for id in 0..u32::try_from(table.entries.len()).unwrap() {
        let entry = table.entry(id);
        assert_eq!(entry.references, expected.get(&id).copied().unwrap_or(0), "references of block {id}");
        let listed = [entry.references > 0, table.free.contains(&id), idle.contains(&id)];
        assert_eq!(listed.iter().filter(|is| **is).count(), 1, "block {id}: used, free, cached = {listed:?}");
        assert!(
            entry.key.is_none_or(|key| table.found.get(&key) == Some(&id)),
            "block {id} isn't found by its key"
        );
    }
    assert_eq!(idle.len(), table.idle);
    assert!(table.found.iter().all(|(key, id)| table.entry(*id).key == Some(*key)));
}

#[test]
fn a_published_prefix_is_found_again_until_it_is_evicted() {
    let mut table = table(4);
    let keys = keys(1, 2);
    let (ids, cached) = table.reserve(&keys, 3).unwrap();
    assert_eq!(cached, 0);
    table.publish(ids[0], keys[0], Some(7));
    table.publish(ids[1], keys[1], None);
    ids.iter().rev().for_each(|id| _ = table.release(*id));
    assert_eq!((table.stats().free, table.stats().cached), (2, 2));

    let (again, cached) = table.reserve(&keys, 3).unwrap();
    assert_eq!((&again[..2], cached, table.digest(again[0])), (&ids[..2], 2, Some(7)));
    again.iter().rev().for_each(|id| _ = table.release(*id));

    let (all, _) = table.reserve(&[], 4).unwrap();
    assert_eq!(table.stats().evictions, 2);
    all.iter().for_each(|id| assert_eq!(table.digest(*id), None, "a digest outlived its block"));
    assert_eq!(table.reserve(&keys, 1), Err(PoolFull { needed: 1, available: 0, total: 4 }));
}

#[test]
fn the_end_of_a_prefix_is_evicted_before_its_beginning() {
    let mut table = table(3);
    let keys = keys(1, 3);
    let (ids, _) = table.reserve(&keys, 3).unwrap();
    ids.iter().zip(&keys).for_each(|(id, key)| table.publish(*id, *key, None));
    ids.iter().rev().for_each(|id| _ = table.release(*id));
    let (other, _) = table.reserve(&[], 1).unwrap();
    assert_eq!(other, [ids[2]]);
    assert_eq!(table.reserve(&keys, 2).unwrap().1, 2);
}

#[test]
fn a_held_block_is_never_handed_out() {
    let mut table = table(2);
    let keys = keys(1, 1);
    let (ids, _) = table.reserve(&keys, 1).unwrap();
    table.publish(ids[0], keys[0], None);
    let (other, _) = table.reserve(&[], 1).unwrap();
    assert_ne!(ids, other);
    assert!(table.reserve(&[], 1).is_err());
    assert_eq!(table.reserve(&keys, 1).unwrap().0, ids, "but it may be shared");
}

#[test]
fn a_found_idle_block_is_not_counted_as_evictable_for_the_same_reservation() {
    let mut table = table(2);
    let keys = keys(1, 1);
    let (ids, _) = table.reserve(&keys, 1).unwrap();
    table.publish(ids[0], keys[0], None);
    table.release(ids[0]);
    assert_eq!(table.headroom(&keys, 3), Err(PoolFull { needed: 2, available: 1, total: 2 }));
    assert!(table.reserve(&keys, 3).is_err());
    check(&table, &[]);
}

#[test]
fn without_the_prefix_cache_nothing_is_remembered() {
    let mut table = BlockTable::new(2, PrefixCache::Off, BlockOrder::Sequential);
    let keys = keys(1, 1);
    let (ids, _) = table.reserve(&keys, 1).unwrap();
    table.publish(ids[0], keys[0], None);
    assert!(table.is_verified(ids[0]));
    table.release(ids[0]);
    assert_eq!((table.stats().free, table.reserve(&keys, 1).unwrap().1), (2, 0));
}

#[test]
fn equal_seeds_shuffle_alike_and_differently_from_the_order() {
    let order = |order| BlockTable::new(64, PrefixCache::On, order).reserve(&[], 64).unwrap().0;
    let (one, same, other) =
        (order(BlockOrder::Shuffled(1)), order(BlockOrder::Shuffled(1)), order(BlockOrder::Shuffled(2)));
    assert!(one == same && one != other && one != order(BlockOrder::Sequential));
    assert_eq!(order(BlockOrder::Sequential), (0..64).collect::<Vec<_>>());
}

#[derive(Clone, Debug)]
enum Step {
    Reserve { prompt: u32, keys: usize, blocks: usize },
    Publish { holder: usize, prompt: u32 },
    Share { holder: usize },
    Drop { holder: usize },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3u32, 0..5usize, 0..8usize).prop_map(|(prompt, keys, blocks)| Step::Reserve {
            prompt,
            keys,
            blocks
        }),
        (0..8usize, 0..3u32).prop_map(|(holder, prompt)| Step::Publish { holder, prompt }),
        (0..8usize).prop_map(|holder| Step::Share { holder }),
        (0..8usize).prop_map(|holder| Step::Drop { holder }),
    ]
}

fn apply(table: &mut BlockTable, held: &mut Vec<Vec<u32>>, step: &Step) {
    match *step {
        Step::Reserve { prompt, keys: count, blocks } => {
            let (keys, before) = (keys(prompt, count), table.stats());
            let headroom = table.headroom(&keys, blocks);
            match table.reserve(&keys, blocks) {
                Ok((ids, _)) => {
                    assert_eq!((ids.len(), Ok(table.stats().available())), (blocks, headroom));
                    held.push(ids);
                }
                Err(full) => assert_eq!((Err(full), before), (headroom, table.stats())),
            }
        }
        Step::Publish { holder, prompt } => {
            let Some(ids) = held.get(holder) else { return };
            ids.iter().zip(keys(prompt, 8)).for_each(|(id, key)| table.publish(*id, key, None));
        }
        Step::Share { holder } => {
            let Some(ids) = held.get(holder).cloned() else { return };
            ids.iter().for_each(|id| table.retain(*id));
            held.push(ids);
        }
        Step::Drop { holder } if holder < held.len() => {
            held.swap_remove(holder).iter().rev().for_each(|id| _ = table.release(*id));
        }
        Step::Drop { .. } => {}
    }
}

proptest! {
    #[test]
    fn every_block_is_free_or_held_or_cached(
        steps in prop::collection::vec(step(), 1..120),
        shuffled in any::<bool>(),
    ) {
        let order = if shuffled { BlockOrder::Shuffled(9) } else { BlockOrder::Sequential };
        let mut table = BlockTable::new(12, PrefixCache::On, order);
        let mut held = Vec::new();
        for step in &steps {
            apply(&mut table, &mut held, step);
            check(&table, &held);
        }
        for ids in held.drain(..) {
            ids.iter().for_each(|id| _ = table.release(*id));
        }
        check(&table, &[]);
        prop_assert_eq!(table.stats().used, 0);
    }
}
