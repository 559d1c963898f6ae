//! The machine that runs the tests: whatever it is, reading it ends without a panic, and it is itself.

use towline_topo::counters::{CounterSample, Direction, Moved, delta, total};
use towline_topo::place::Relation;
use towline_topo::snapshot::Snapshot;
use towline_topo::system::Live;

#[test]
fn this_machine_is_on_its_own_host() {
    let (first, second) = (Snapshot::read(&Live), Snapshot::read(&Live));
    if first.place.boot.is_none() {
        crate::skips::note("place of this machine", "its boot id can't be read");
        return;
    }
    let relation = first.place.relation(&second.place);
    assert!(matches!(relation, Relation::SameProcess | Relation::SameHost), "{relation:?} {:?}", first.gaps);
}

#[test]
fn loopback_counts_never_go_backwards() {
    let before = CounterSample::of_netdev(&Live, "lo");
    if before.readings.len() != 2 {
        crate::skips::note("counters of this machine", "the counters of lo can't be read");
        return;
    }
    let changes = delta(&before, &CounterSample::of_netdev(&Live, "lo"));
    assert!(matches!(total(&changes, Direction::Sent), Moved::Bytes(_)), "{changes:?}");
}
