//! How a reader that waits keeps what it was lent: one heartbeat a pair of ranks for all pulls, from connecting to releasing.

use std::sync::Arc;
use std::time::Duration;

use towline_wire::id::LeaseId;
use towline_wire::lease::Readers;
use towline_wire::parts::Parts;
use towline_wire::receipt::TransportKind;
use towline_worker::handoff::Lent;

use super::leases::{TOKENS, engines};
use super::models::LAYERS;
use super::{BOTH, Owner, PATIENCE, Terms, eventually};

/// Lends what is not computed yet.
fn lend_early(owner: &Owner, hold: &Arc<()>) -> Lent {
    let terms = Terms { parts: Parts::by_layer(LAYERS), computed: 0, readers: Readers::First(1) };
    owner.lend(TOKENS.end, terms, hold)
}

/// Waits until the newest heartbeat names exactly `leases`.
async fn beat_of<const N: usize>(owner: &Owner, leases: [LeaseId; N]) {
    let newest = || owner.beats.lock().unwrap().last().is_some_and(|beat| *beat == leases);
    eventually("a heartbeat of these leases", newest).await;
}

#[tokio::test]
async fn pulls_of_a_pair_share_one_heartbeat_and_leave_it_one_by_one() {
    let (owner, readers) = engines(TransportKind::Tcp, PATIENCE);
    let [first, second] = [(); 2].map(|()| lend_early(&owner, &Arc::new(())));
    let (one, other) = (first.lease.lease, second.lease.lease);
    let (mut nothing, mut more) = ((), ());
    let mut waits = Box::pin(readers.pull(0, (&second, &TOKENS), &mut more));
    {
        let leaves = readers.pull(0, (&first, &TOKENS), &mut nothing);
        tokio::select! {
            _ = leaves => panic!("nothing is computed"),
            _ = &mut waits => panic!("nothing is computed"),
            () = beat_of(&owner, [one, other]) => {}
        }
    }
    tokio::select! {
        _ = &mut waits => panic!("nothing is computed"),
        () = beat_of(&owner, [other]) => {}
    }
    eventually("the one that left has released", || owner.held() == 1).await;
}

#[tokio::test]
async fn a_lease_outlives_its_time_as_long_as_its_reader_waits() {
    for transport in BOTH {
        // Three hundred heartbeats.
        let (owner, readers) = engines(transport, Duration::from_secs(3));
        let (wanted, forgotten) = (Arc::new(()), Arc::new(()));
        let lent = lend_early(&owner, &wanted);
        let mut nothing = ();
        let mut pull = Box::pin(readers.pull(0, (&lent, &TOKENS), &mut nothing));
        tokio::select! {
            _ = &mut pull => panic!("nothing is computed"),
            () = beat_of(&owner, [lent.lease.lease]) => {}
        }
        // Lent later, so that it ends after the first would have without its reader.
        lend_early(&owner, &forgotten);
        tokio::select! {
            _ = &mut pull => panic!("nothing is computed"),
            () = eventually("nobody comes", || Arc::strong_count(&forgotten) == 1) => {}
        }
        assert_eq!((Arc::strong_count(&wanted), owner.held()), (2, 1));
        (0..LAYERS).for_each(|layer| owner.compute(&lent, layer));
        pull.await.unwrap();
        eventually("its reader releases it", || owner.held() == 0).await;
    }
}
