//! The machine, step by step, and under events in every order.

use proptest::prelude::*;

use super::*;
use crate::fence::{Fence, FenceError};
use crate::id::Generation;

const GENERATION: Generation = Generation(7);
const MISMATCH: DigestMismatch = DigestMismatch { position: 0, promised: 1, found: 2 };

fn at(us: u64) -> Now {
    Duration::from_micros(us)
}

/// Computed before it was lent: one part, one source.
fn start() -> Handoff {
    parted(1, 1)
}

/// One source with `parts` parts, `ready` of them ready.
fn parted(parts: u32, ready: u32) -> Handoff {
    let source = Source { generation: GENERATION, parts: (0..parts).collect(), parts_ready: ready };
    Handoff::new(vec![source], parts, Duration::from_secs(10))
}

fn slot(generation: Generation, parts_ready: u64) -> [u8; 24] {
    Fence { generation, parts_ready }.encode()
}

fn connected() -> Event {
    Event::Connected { source: 0 }
}

fn arrived() -> Event {
    Event::DataArrived { source: 0 }
}

fn fence(generation: Generation, ready: u64) -> Event {
    Event::FenceRead { source: 0, slot: slot(generation, ready) }
}

const CONNECT: Action = Action::Connect { source: 0 };
const READ_FENCE: Action = Action::ReadFence { source: 0 };
const RELEASE: Action = Action::Release { source: 0 };

fn read(parts: Range<u32>) -> Action {
    Action::ReadParts { source: 0, parts }
}

fn step(handoff: &mut Handoff, expected: Action, event: Event) {
    assert_eq!(handoff.poll_action(), Some(expected));
    assert_eq!(handoff.poll_action(), None, "one action at a time");
    handoff.handle_event(at(1), event);
}

fn up_to_fence(handoff: &mut Handoff) {
    step(handoff, CONNECT, connected());
    step(handoff, read(0..1), arrived());
}

#[test]
fn a_good_handoff_releases_and_succeeds() {
    let mut handoff = start();
    up_to_fence(&mut handoff);
    assert_eq!(handoff.poll_part(), None, "no part is complete before its fence");
    step(&mut handoff, READ_FENCE, fence(GENERATION, 1));
    assert_eq!((handoff.poll_part(), handoff.poll_part()), (Some(0), None));
    step(&mut handoff, Action::Digest, Event::Digested(Ok(())));
    assert_eq!(handoff.poll_action(), Some(RELEASE));
    assert_eq!((handoff.poll_action(), handoff.outcome()), (None, Some(&Ok(()))));
    assert_eq!(handoff.next_timer(), None);
}

#[test]
fn a_changed_generation_is_never_used() {
    let mut handoff = start();
    up_to_fence(&mut handoff);
    step(&mut handoff, READ_FENCE, fence(Generation(8), 1));
    assert_eq!((handoff.poll_action(), handoff.poll_part()), (Some(RELEASE), None));
    assert!(matches!(handoff.outcome(), Some(Err(HandoffError::Expired { .. }))));
}

#[test]
fn a_torn_slot_is_read_again_but_not_for_ever() {
    let mut handoff = start();
    up_to_fence(&mut handoff);
    for _ in 0..FENCE_READS_MAX {
        step(&mut handoff, READ_FENCE, Event::FenceRead { source: 0, slot: [1; 24] });
    }
    assert_eq!(handoff.outcome(), Some(&Err(HandoffError::Expired { detail: FenceError::Torn })));
}

#[test]
fn another_digest_fails() {
    let mut handoff = start();
    up_to_fence(&mut handoff);
    step(&mut handoff, READ_FENCE, fence(GENERATION, 1));
    step(&mut handoff, Action::Digest, Event::Digested(Err(MISMATCH)));
    assert_eq!(handoff.outcome(), Some(&Err(HandoffError::DigestMismatch(MISMATCH))));
}

#[test]
fn the_fence_cannot_be_read_before_the_data() {
    let mut handoff = start();
    step(&mut handoff, CONNECT, connected());
    step(&mut handoff, read(0..1), fence(GENERATION, 1));
    assert_eq!((handoff.poll_action(), handoff.outcome()), (None, None), "an early fence counts for nothing");
}

#[test]
fn the_deadline_ends_every_phase() {
    let mut handoff = start();
    step(&mut handoff, CONNECT, connected());
    handoff.handle_event(Duration::from_secs(10), Event::Tick);
    assert!(matches!(handoff.outcome(), Some(Err(HandoffError::Stalled { .. }))));
    assert_eq!(handoff.poll_action(), Some(RELEASE));
}

#[test]
fn parts_are_read_as_they_become_ready() {
    let mut handoff = parted(4, 0);
    step(&mut handoff, CONNECT, connected());
    step(&mut handoff, READ_FENCE, fence(GENERATION, 1));
    step(&mut handoff, read(0..1), arrived());
    // What shows that part 0 is good also shows that two more are ready: they are read at once, together.
    step(&mut handoff, READ_FENCE, fence(GENERATION, 3));
    assert_eq!(handoff.poll_part(), Some(0));
    step(&mut handoff, read(1..3), arrived());
    step(&mut handoff, READ_FENCE, fence(GENERATION, 3));
    assert_eq!((handoff.poll_part(), handoff.poll_part(), handoff.poll_part()), (Some(1), Some(2), None));
    step(&mut handoff, READ_FENCE, fence(GENERATION, 4));
    step(&mut handoff, read(3..4), arrived());
    step(&mut handoff, READ_FENCE, fence(GENERATION, 4));
    step(&mut handoff, Action::Digest, Event::Digested(Ok(())));
    assert_eq!((handoff.poll_part(), handoff.outcome()), (Some(3), Some(&Ok(()))));
}

#[test]
fn a_slot_that_shows_nothing_new_is_read_less_and_less_often() {
    let mut handoff = parted(2, 0);
    step(&mut handoff, CONNECT, connected());
    let (mut now, mut waits) = (Duration::ZERO, vec![]);
    for _ in 0..9 {
        assert_eq!(handoff.poll_action(), Some(READ_FENCE));
        handoff.handle_event(now, fence(GENERATION, 0));
        let due = handoff.next_timer().unwrap();
        handoff.handle_event(due - at(1), Event::Tick);
        assert_eq!(handoff.poll_action(), None, "too early");
        waits.push(due - now);
        now = due;
        handoff.handle_event(now, Event::Tick);
    }
    assert_eq!(waits[..3], [RETRY_MIN, RETRY_MIN * 2, RETRY_MIN * 4]);
    assert_eq!(waits[7..], [RETRY_MAX, RETRY_MAX]);
}

#[test]
fn a_generation_that_changes_between_parts_is_noticed_while_waiting() {
    let mut handoff = parted(2, 1);
    up_to_fence(&mut handoff);
    step(&mut handoff, READ_FENCE, fence(GENERATION, 1));
    assert_eq!(handoff.poll_part(), Some(0));
    step(&mut handoff, READ_FENCE, fence(Generation(9), 2));
    assert!(matches!(handoff.outcome(), Some(Err(HandoffError::Expired { .. }))));
    assert_eq!((handoff.poll_action(), handoff.poll_part()), (Some(RELEASE), None));
}

#[test]
fn a_count_that_shrinks_under_the_data_is_an_end() {
    let mut handoff = parted(2, 2);
    step(&mut handoff, CONNECT, connected());
    step(&mut handoff, read(0..2), arrived());
    step(&mut handoff, READ_FENCE, fence(GENERATION, 1));
    let detail = FenceError::NotReady { ready: 1, needed: 2 };
    assert_eq!(handoff.outcome(), Some(&Err(HandoffError::Expired { detail })));
}

/// Two stages of a pipeline: the first has part 0, the second part 1, both have part 2.
fn two() -> Handoff {
    let source = |generation, parts: &[u32], parts_ready| Source {
        generation: Generation(generation),
        parts: parts.to_vec(),
        parts_ready,
    };
    Handoff::new(vec![source(1, &[0, 2], 3), source(2, &[1, 2], 3)], 3, Duration::from_secs(10))
}

fn actions(handoff: &mut Handoff) -> Vec<Action> {
    std::iter::from_fn(|| handoff.poll_action()).collect()
}

#[test]
fn a_part_is_complete_when_it_came_from_all_its_sources() {
    let mut handoff = two();
    assert_eq!(actions(&mut handoff).len(), 2, "both are dialled at once");
    for source in [0, 1] {
        handoff.handle_event(at(1), Event::Connected { source });
    }
    let parts = |source, parts| Action::ReadParts { source, parts };
    assert_eq!(actions(&mut handoff), [parts(0, 0..3), parts(1, 1..3)]);
    handoff.handle_event(at(1), Event::DataArrived { source: 0 });
    handoff.handle_event(at(1), Event::FenceRead { source: 0, slot: slot(Generation(1), 3) });
    assert_eq!((handoff.poll_part(), handoff.poll_part()), (Some(0), None), "part 1 is the other's");
    assert_eq!(actions(&mut handoff), [Action::ReadFence { source: 0 }], "nothing is digested yet");
    handoff.handle_event(at(1), Event::DataArrived { source: 1 });
    handoff.handle_event(at(1), Event::FenceRead { source: 1, slot: slot(Generation(2), 3) });
    assert_eq!((handoff.poll_part(), handoff.poll_part()), (Some(1), Some(2)));
    assert_eq!(actions(&mut handoff), [Action::ReadFence { source: 1 }, Action::Digest]);
    handoff.handle_event(at(1), Event::Digested(Ok(())));
    assert_eq!(actions(&mut handoff), [0, 1].map(|source| Action::Release { source }));
}

#[test]
fn one_source_that_fails_ends_all_and_frees_the_others() {
    let mut handoff = two();
    handoff.handle_event(at(1), Event::Connected { source: 1 });
    handoff.handle_event(at(1), Event::Failed(HandoffError::PeerRestarted));
    assert_eq!(actions(&mut handoff), [Action::Release { source: 1 }], "only whom it reached");
    assert_eq!(handoff.outcome(), Some(&Err(HandoffError::PeerRestarted)));
}

#[test]
fn a_source_of_which_nothing_is_needed_is_only_released() {
    let nothing = Source { generation: GENERATION, parts: vec![], parts_ready: 0 };
    let mut handoff = Handoff::new(vec![nothing], 2, Duration::from_secs(10));
    step(&mut handoff, CONNECT, connected());
    step(&mut handoff, Action::Digest, Event::Digested(Ok(())));
    assert_eq!((handoff.poll_action(), handoff.outcome()), (Some(RELEASE), Some(&Ok(()))));
}

const SOURCES: usize = 2;
const PARTS: u32 = 3;

fn any_event() -> impl Strategy<Value = Event> {
    let source = 0..SOURCES;
    let shown = (source.clone(), prop_oneof![8 => Just(7u64), 1 => Just(8)], 0..=u64::from(PARTS));
    prop_oneof![
        4 => source.clone().prop_map(|source| Event::Connected { source }),
        8 => source.clone().prop_map(|source| Event::DataArrived { source }),
        12 => shown.prop_map(|(source, g, ready)| Event::FenceRead { source, slot: slot(Generation(g), ready) }),
        1 => source.prop_map(|source| Event::FenceRead { source, slot: [9; 24] }),
        3 => Just(Event::Digested(Ok(()))),
        1 => Just(Event::Digested(Err(MISMATCH))),
        3 => Just(Event::Tick),
        1 => Just(Event::Cancelled),
    ]
}

/// What is known of one source, by the rules alone.
#[derive(Default)]
struct Proof {
    connected: bool,
    shown: u64,
    asked: Option<u32>,
    arrived: bool,
    good: u32,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// No part is read before it was shown to be ready, none counts before its data and then a fence of the right
    /// generation came, and success needs all of them, in time, and the right digest.
    #[test]
    fn every_part_needs_readiness_then_data_then_fence(
        readies in prop::array::uniform2(0..=PARTS),
        events in prop::collection::vec((any_event(), 0u64..40), 0..120),
    ) {
        let source = |parts_ready| Source { generation: GENERATION, parts: (0..PARTS).collect(), parts_ready };
        let mut handoff = Handoff::new(readies.map(source).to_vec(), PARTS, Duration::from_secs(1));
        let mut proofs: Vec<Proof> = readies.iter().map(|ready| Proof { shown: u64::from(*ready), ..Proof::default() }).collect();
        let (mut now, mut told, mut digested) = (Duration::ZERO, 0, false);
        for (event, ms) in events {
            now += Duration::from_millis(ms);
            let before = handoff.outcome().is_some();
            match &event {
                Event::Connected { source } => proofs[*source].connected = true,
                Event::DataArrived { source } => proofs[*source].arrived |= proofs[*source].asked.is_some(),
                Event::FenceRead { source, slot } => if let Ok(Fence { generation: GENERATION, parts_ready }) = Fence::decode(slot) {
                    let proof = &mut proofs[*source];
                    if proof.connected { proof.shown = proof.shown.max(parts_ready); }
                    if let Some(to) = proof.asked.filter(|to| proof.arrived && parts_ready >= u64::from(*to)) {
                        (proof.good, proof.asked, proof.arrived) = (to, None, false);
                    }
                },
                Event::Digested(found) => digested = found.is_ok() && proofs.iter().all(|proof| proof.good == PARTS),
                _ => {}
            }
            handoff.handle_event(now, event);
            while let Some(action) = handoff.poll_action() {
                if let Action::ReadParts { source, parts } = action {
                    prop_assert!(proofs[source].connected && u64::from(parts.end) <= proofs[source].shown);
                    prop_assert_eq!(parts.start, proofs[source].good);
                    proofs[source].asked = Some(parts.end);
                }
            }
            while let Some(part) = handoff.poll_part() {
                prop_assert_eq!(part, told);
                told += 1;
                prop_assert!(proofs.iter().all(|proof| proof.good >= told), "part {} is not proved", part);
            }
            if !before && handoff.outcome() == Some(&Ok(())) {
                prop_assert!(digested && told == PARTS && now < Duration::from_secs(1));
            }
        }
    }
}
