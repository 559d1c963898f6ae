//! The four kinds of layouts, each lent before it is computed and pulled layer by layer, from two ranks to one and to
//! two stages: after each layer every reader holds exactly the layers that were computed, to the byte.

use std::ops::Range;
use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use towline_wire::parts::Parts;
use towline_wire::shard::Sharding;
use towline_worker::handoff::{Lent, PullWatch};

use super::models::{self, LAYERS, Model, Style};
use super::oracle::{Engine, Scatter, all, needed};
use super::{BOTH, Destination, Owner, PATIENCE, Terms, eventually};

/// Passes on which parts came.
pub(super) struct Tell(pub(super) UnboundedSender<u32>);

impl PullWatch for Tell {
    fn handle_part(&mut self, part: u32) {
        self.0.send(part).unwrap();
    }
}

/// Computes a layer when every reader has the one before, and looks at what they hold.
async fn direct(
    owner: &Owner,
    (lent, tokens): (&Lent, &Range<u64>),
    readers: &Destination,
    mut parts: Vec<UnboundedReceiver<u32>>,
) {
    for layer in 0..LAYERS {
        owner.compute(lent, layer);
        let places = readers.oracle.sharding.ranks();
        for ((rank, place), parts) in (0..).zip(places).zip(&mut parts) {
            assert_eq!(parts.recv().await, Some(layer));
            let stage = readers.oracle.sharding.layers(place.pp_index);
            // A stage without the layer has nothing to wait for, and may be told of it early.
            if stage.contains(&layer) {
                readers.check(rank, tokens, layer + 1);
            }
        }
    }
}

async fn check(model: Model, into: Sharding) {
    let tokens = 0..45;
    let from = Sharding { tp_size: 2, stage_layers: vec![LAYERS] };
    for transport in BOTH {
        let scatter = Scatter::Shuffled(3);
        let layout = models::layout(model, Style::PLAIN);
        let mut source = Engine::new(layout.clone(), from.clone(), all(&tokens), scatter);
        source.fill(all(&tokens));
        let owner = Owner::start(source, PATIENCE);
        let empty = Engine::new(layout, into.clone(), needed(&tokens), scatter);
        let readers = Destination::start(empty, transport);
        let hold = Arc::new(());
        let terms = Terms { parts: Parts::by_layer(LAYERS), computed: 0, readers: readers.readers() };
        let lent = owner.lend(tokens.end, terms, &hold);
        let (tells, parts): (Vec<_>, Vec<_>) = (0..readers.ranks()).map(|_| unbounded_channel()).unzip();
        let pulls = tells.into_iter().enumerate().map(|(rank, tell)| {
            let (readers, lent, tokens) = (&readers, &lent, &tokens);
            async move { readers.pull(rank, (lent, tokens), &mut Tell(tell)).await.unwrap() }
        });
        let pulls = futures_util::future::join_all(pulls);
        let both = async { tokio::join!(pulls, direct(&owner, (&lent, &tokens), &readers, parts)).0 };
        let receipts = tokio::time::timeout(PATIENCE, both).await.expect("pulls that end");
        assert!(receipts.iter().all(|receipts| !receipts.is_empty()));
        readers.check_all(&tokens);
        eventually("the last reader's release frees every rank", || Arc::strong_count(&hold) == 1).await;
    }
}

fn one() -> Sharding {
    Sharding { tp_size: 1, stage_layers: vec![LAYERS] }
}

fn stages() -> Sharding {
    Sharding { tp_size: 1, stage_layers: vec![2, 4] }
}

#[tokio::test]
async fn a_llama_moves_layer_by_layer() {
    check(Model::Gqa(4), one()).await;
    check(Model::Gqa(4), stages()).await;
}

#[tokio::test]
async fn sliding_windows_with_scales_move_layer_by_layer() {
    check(Model::Sliding, one()).await;
    check(Model::Sliding, stages()).await;
}

#[tokio::test]
async fn latents_with_an_indexer_move_layer_by_layer() {
    check(Model::Mla, one()).await;
    check(Model::Mla, stages()).await;
}

#[tokio::test]
async fn a_hybrid_with_states_moves_layer_by_layer() {
    check(Model::State, one()).await;
    check(Model::State, stages()).await;
}
