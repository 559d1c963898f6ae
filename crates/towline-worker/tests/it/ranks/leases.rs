//! A lease over ranks: its readers by name, its one end on all ranks, and what readers learn when it ends too early.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use towline_wire::auth::Identity;
use towline_wire::handoff::HandoffError;
use towline_wire::id::{AgentName, BootEpoch};
use towline_wire::lease::{LeaseError, Readers};
use towline_wire::parts::Parts;
use towline_wire::receipt::TransportKind;
use towline_wire::shard::Sharding;

use super::layouts::Tell;
use super::models::{self, LAYERS, Model, Style};
use super::oracle::{Engine, Scatter, all, needed};
use super::{BOTH, Destination, Owner, PATIENCE, Terms, eventually};

pub(super) const TOKENS: Range<u64> = 0..32;

fn tp(tp_size: u32) -> Sharding {
    Sharding { tp_size, stage_layers: vec![LAYERS] }
}

/// From two ranks to two.
pub(super) fn engines(transport: TransportKind, ttl: Duration) -> (Owner, Destination) {
    let layout = || models::layout(Model::Gqa(4), Style::PLAIN);
    let mut source = Engine::new(layout(), tp(2), all(&TOKENS), Scatter::Tight);
    source.fill(all(&TOKENS));
    let empty = Engine::new(layout(), tp(2), needed(&TOKENS), Scatter::Tight);
    (Owner::start(source, ttl), Destination::start(empty, transport))
}

#[tokio::test]
async fn the_blocks_of_all_ranks_come_free_with_the_last_reader() {
    for transport in BOTH {
        let (owner, readers) = engines(transport, PATIENCE);
        let hold = Arc::new(());
        let lent = owner.lend_whole(TOKENS.end, readers.readers(), &hold);
        for _ in 0..2 {
            // The same reader twice is one reader.
            readers.pull(0, (&lent, &TOKENS), &mut ()).await.unwrap();
        }
        assert_eq!((owner.held(), Arc::strong_count(&hold)), (1, 2));
        readers.pull(1, (&lent, &TOKENS), &mut ()).await.unwrap();
        eventually("both ranks' blocks come free", || Arc::strong_count(&hold) == 1).await;
        assert_eq!(owner.held(), 0);
        readers.check_all(&TOKENS);
    }
}

#[tokio::test]
async fn only_named_readers_end_a_lease_at_whichever_rank_they_say_so() {
    let (owner, readers) = engines(TransportKind::Tcp, PATIENCE);
    let hold = Arc::new(());
    let lent = owner.lend_whole(TOKENS.end, readers.readers(), &hold);
    let release = |rank: u32, agent: &str| {
        let peer = Identity { agent: AgentName::new(agent).unwrap(), boot_epoch: BootEpoch(1) };
        let generation = lent.lease.ranks[rank as usize].generation;
        owner.lender.keeper.owner(rank).handle_release(&peer, lent.lease.lease, generation)
    };
    let stranger = Err(LeaseError::Reader { lease: lent.lease.lease });
    assert_eq!((release(0, "d/0"), release(1, "d/0"), release(1, "x")), (Ok(()), Ok(()), stranger));
    assert_eq!((owner.held(), Arc::strong_count(&hold)), (1, 2));
    assert_eq!(release(1, "d/1"), Ok(()));
    assert_eq!((owner.held(), Arc::strong_count(&hold)), (0, 1));
}

#[tokio::test]
async fn a_lease_that_a_reader_forgets_expires_on_all_ranks() {
    for transport in BOTH {
        let (owner, readers) = engines(transport, Duration::from_millis(50));
        let hold = Arc::new(());
        let lent = owner.lend_whole(TOKENS.end, readers.readers(), &hold);
        eventually("nobody comes", || Arc::strong_count(&hold) == 1).await;
        for rank in 0..2 {
            let error = readers.pull(rank, (&lent, &TOKENS), &mut ()).await.unwrap_err();
            let over = matches!(error, HandoffError::Expired { .. } | HandoffError::LeaseOver);
            assert!(over, "{transport}: {error}");
        }
    }
}

/// Lends by layer, computes layer 0, and does `then` when rank 0 of the readers has it; how its pull ends.
async fn after_the_first_layer(
    (owner, readers): (&mut Owner, &Destination),
    then: impl FnOnce(&mut Owner, &towline_worker::handoff::Lent),
) -> HandoffError {
    let terms = Terms { parts: Parts::by_layer(LAYERS), computed: 0, readers: readers.readers() };
    let lent = owner.lend(TOKENS.end, terms, &Arc::new(()));
    owner.compute(&lent, 0);
    let (tell, mut parts) = unbounded_channel();
    let pull = async {
        let mut tell = Tell(tell);
        readers.pull(0, (&lent, &TOKENS), &mut tell).await.unwrap_err()
    };
    let direct = async {
        assert_eq!(parts.recv().await, Some(0));
        then(owner, &lent);
        assert_eq!(parts.recv().await, None, "no other part is taken for good");
    };
    let both = async { tokio::join!(pull, direct).0 };
    tokio::time::timeout(PATIENCE, both).await.expect("a pull that ends")
}

#[tokio::test]
async fn blocks_that_are_lent_anew_between_parts_are_never_taken_for_the_old() {
    for transport in BOTH {
        let (mut owner, readers) = engines(transport, PATIENCE);
        let error = after_the_first_layer((&mut owner, &readers), |owner, lent| {
            owner.lender.revoke(lent);
            // The same slots and blocks, another request: all of it is computed at once.
            let next = owner.lend_whole(TOKENS.end, Readers::First(1), &Arc::new(()));
            let slots =
                |lent: &towline_worker::handoff::Lent| lent.lease.ranks.iter().map(|g| g.slot).collect();
            let (before, after): (Vec<u32>, Vec<u32>) = (slots(lent), slots(&next));
            assert_eq!(before, after);
            owner.compute(lent, 1);
        })
        .await;
        let over = matches!(error, HandoffError::Expired { .. } | HandoffError::LeaseOver);
        assert!(over, "{transport}: {error}");
        readers.check(0, &TOKENS, 1);
    }
}

#[tokio::test]
async fn a_rank_that_dies_between_parts_ends_the_pull_and_the_others_are_released() {
    for transport in BOTH {
        let layout = || models::layout(Model::Gqa(4), Style::PLAIN);
        let mut source = Engine::new(layout(), tp(2), all(&TOKENS), Scatter::Tight);
        source.fill(all(&TOKENS));
        let mut owner = Owner::start(source, PATIENCE);
        let empty = Engine::new(layout(), tp(1), needed(&TOKENS), Scatter::Tight);
        let readers = Destination::start(empty, transport);
        let error = after_the_first_layer((&mut owner, &readers), |owner, _| {
            owner.regions.truncate(1);
            owner.agents[1] = None;
        })
        .await;
        let gone = matches!(error, HandoffError::Unreachable { .. });
        assert!(gone, "{transport}: {error}");
        eventually("the reader's release reaches rank 0", || owner.held() == 0).await;
        readers.check(0, &TOKENS, 1);
    }
}
