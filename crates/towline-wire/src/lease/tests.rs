//! The book of leases: endings, readers, parts, and that no block is lost or given back twice.

use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_secs(30);

fn at(seconds: u64) -> Now {
    Duration::from_secs(seconds)
}

fn name(reader: &str) -> AgentName {
    AgentName::new(reader).unwrap()
}

/// Lends computed blocks to whoever comes first.
fn terms(blocks: Vec<u32>, readers: u32) -> Terms {
    Terms { blocks, readers: Readers::First(readers), parts_ready: 1, ttl: TTL }
}

#[test]
fn blocks_come_out_only_with_the_fence_stored() {
    let mut table = LeaseTable::new(4);
    let grant = table.grant(at(0), terms(vec![3, 4], 1)).unwrap();
    let over = table.release(grant.lease, grant.generation, &name("d")).unwrap().unwrap();
    let mut stored = None;
    let blocks = over.fenced(|slot, generation| stored = Some((slot, generation)));
    let (slot, generation) = stored.unwrap();
    assert_eq!((blocks, slot), (vec![3, 4], grant.slot));
    assert!(generation > grant.generation);
}

/// Otherwise a grant's generation could be overwritten by the store of the lease that had the slot before it,
/// and its readers be told that a live lease is over.
#[test]
fn a_slot_is_granted_again_only_after_it_was_fenced() {
    let mut table = LeaseTable::new(1);
    let grant = table.grant(at(0), terms(vec![1], 1)).unwrap();
    let over = table.release(grant.lease, grant.generation, &name("d")).unwrap().unwrap();
    assert_eq!((table.len(), table.free()), (0, 0));
    assert_eq!(table.grant(at(0), terms(vec![2], 1)), Err(LeaseError::Full { slots: 1 }));
    _ = over.fenced(|_, _| ());
    assert_eq!(table.free(), 1);
    assert_eq!(table.grant(at(0), terms(vec![2], 1)).unwrap().slot, grant.slot);
}

#[test]
fn the_last_of_several_readers_ends_the_lease_and_a_retry_is_not_a_reader() {
    let mut table = LeaseTable::new(4);
    let grant = table.grant(at(0), terms(vec![1], 2)).unwrap();
    let mut release = |reader| table.release(grant.lease, grant.generation, &name(reader));
    assert!(release("d0").unwrap().is_none());
    assert!(release("d0").unwrap().is_none(), "the message came twice");
    assert!(release("d1").unwrap().is_some());
    assert_eq!(release("d1").unwrap_err(), LeaseError::Over { lease: grant.lease });
}

#[test]
fn only_named_readers_keep_a_lease_or_end_it() {
    let mut table = LeaseTable::new(4);
    let readers = Readers::Named([name("d0"), name("d1")].into());
    let grant = table.grant(at(0), Terms { readers, ..terms(vec![1], 1) }).unwrap();
    let stranger = Err(LeaseError::Reader { lease: grant.lease });
    assert_eq!(table.extend(at(9), grant.lease, &name("x"), TTL), stranger);
    assert!(table.release(grant.lease, grant.generation, &name("x")).is_err());
    assert!(table.release(grant.lease, grant.generation, &name("d0")).unwrap().is_none());
    assert_eq!(table.extend(at(9), grant.lease, &name("d0"), TTL), stranger, "it has released");
    assert_eq!(table.extend(at(9), grant.lease, &name("d1"), TTL), Ok(()));
    let over = table.poll_expired(at(39)).unwrap();
    assert_eq!((over.cause, over.readers.clone()), (EndCause::Expired, [name("d1")].into()));
}

#[test]
fn who_comes_first_takes_the_place() {
    let mut table = LeaseTable::new(4);
    let grant = table.grant(at(0), terms(vec![1], 1)).unwrap();
    assert_eq!(table.extend(at(1), grant.lease, &name("d0"), TTL), Ok(()));
    let late = table.release(grant.lease, grant.generation, &name("d1"));
    assert_eq!(late.unwrap_err(), LeaseError::Reader { lease: grant.lease });
    assert!(table.release(grant.lease, grant.generation, &name("d0")).unwrap().is_some());
}

#[test]
fn a_count_of_parts_only_grows_and_never_outlives_its_lease() {
    let mut table = LeaseTable::new(1);
    let grant = table.grant(at(0), Terms { parts_ready: 0, ..terms(vec![1], 1) }).unwrap();
    let mut stored = vec![];
    for ready in [1, 3, 2, 3] {
        let store = |slot, ready| stored.push((slot, ready));
        table.mark(grant.lease, grant.generation, ready, store).unwrap();
    }
    assert_eq!(stored, [(grant.slot, 1), (grant.slot, 3)]);
    let over = table.revoke(grant.lease).unwrap();
    _ = over.fenced(|_, _| ());
    let next = table.grant(at(0), Terms { parts_ready: 0, ..terms(vec![1], 1) }).unwrap();
    assert_eq!(next.slot, grant.slot);
    let late = table.mark(grant.lease, grant.generation, 4, |_, _| panic!("stored in another lease's slot"));
    assert_eq!(late, Err(LeaseError::Over { lease: grant.lease }));
}

#[test]
fn an_owner_that_still_computes_keeps_its_lease() {
    let mut table = LeaseTable::new(1);
    let grant = table.grant(at(0), terms(vec![1], 1)).unwrap();
    table.keep(at(20), grant.lease, TTL).unwrap();
    assert_eq!(table.next_expiry(), Some(at(50)));
}

#[test]
fn a_heartbeat_keeps_a_lease_and_its_absence_ends_it() {
    let mut table = LeaseTable::new(4);
    let grant = table.grant(at(0), terms(vec![1], 1)).unwrap();
    table.extend(at(20), grant.lease, &name("d"), TTL).unwrap();
    assert!(table.poll_expired(at(49)).is_none());
    assert_eq!(table.poll_expired(at(50)).unwrap().cause, EndCause::Expired);
    assert!(table.is_empty());
}

#[test]
fn a_full_table_and_uncovered_blocks_are_refused() {
    let mut table = LeaseTable::new(1);
    let grant = table.grant(at(0), terms(vec![1], 1)).unwrap();
    assert_eq!(table.grant(at(0), terms(vec![2], 1)), Err(LeaseError::Full { slots: 1 }));
    assert_eq!(table.check(grant.lease, grant.generation, [1].into_iter()), Ok(()));
    assert!(matches!(
        table.check(grant.lease, grant.generation, [2].into_iter()),
        Err(LeaseError::NotCovered { .. })
    ));
    assert!(matches!(
        table.check(grant.lease, Generation(99), [1].into_iter()),
        Err(LeaseError::Over { .. })
    ));
}

proptest! {
    /// Whatever happens, every block granted comes back exactly once, and no generation is used twice.
    #[test]
    fn every_block_returns_exactly_once(steps in prop::collection::vec((0u8..4, 0u64..40), 1..80)) {
        let mut table = LeaseTable::new(8);
        let (mut next_block, mut granted, mut returned) = (0u32, vec![], vec![]);
        let (mut live, mut generations, mut now): (Vec<Grant>, Vec<Generation>, Now) = (vec![], vec![], at(0));
        let take = |over: Revocation, returned: &mut Vec<u32>, generations: &mut Vec<Generation>| {
            returned.extend(over.fenced(|_, generation| generations.push(generation)));
        };
        for (kind, amount) in steps {
            match kind {
                0 => if let Ok(grant) = table.grant(now, terms(vec![next_block], 1)) {
                    granted.push(next_block);
                    generations.push(grant.generation);
                    next_block += 1;
                    live.push(grant);
                },
                1 if !live.is_empty() => {
                    let index = usize::try_from(amount).unwrap() % live.len();
                    let grant = live.swap_remove(index);
                    if let Ok(Some(over)) = table.release(grant.lease, grant.generation, &name("d")) { take(over, &mut returned, &mut generations); }
                }
                2 => now += at(amount),
                _ => while let Some(over) = table.poll_expired(now) { take(over, &mut returned, &mut generations); },
            }
        }
        now += at(1000);
        while let Some(over) = table.poll_expired(now) { take(over, &mut returned, &mut generations); }
        returned.sort_unstable();
        prop_assert_eq!(returned, granted);
        let count = generations.len();
        generations.sort_unstable();
        generations.dedup();
        prop_assert_eq!(generations.len(), count);
    }
}
