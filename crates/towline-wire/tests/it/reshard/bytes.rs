//! Every byte where it should be, and no other touched.

use std::ops::Range;

use proptest::prelude::*;
use towline_wire::layout::{Arrangement, HeadOrder};
use towline_wire::reshard::{PIECES_MAX, Plan, Request, Steps, plan};
use towline_wire::shard::Sharding;

use super::models::{self, Model, Style};
use super::oracle::{Engine, Scatter, all, needed};

/// Plans `tokens` from one engine to another, applies the plan, and compares all memory with the oracle's.
fn check(
    source: &Engine,
    destination: &mut Engine,
    tokens: &Range<u64>,
    (steps, rotation): (Steps, u32),
) -> Plan {
    destination.poison();
    let made = {
        let (from, into) = (source.pools(), destination.pools());
        plan(&Request {
            source: source.side(&from),
            destination: destination.side(&into),
            tokens: tokens.clone(),
            steps,
            rotation,
            pieces_max: PIECES_MAX,
        })
        .unwrap()
    };
    destination.apply(source, &made, if rotation % 2 == 0 { u64::MAX } else { 7 });
    for (rank, expected) in destination.expected(tokens).into_iter().enumerate() {
        let wrong = destination.ranks[rank].cells.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "first wrong byte of rank {rank}");
    }
    made
}

/// The source keeps a little more than is asked for, the destination has blocks for just what it needs.
fn engines(
    model: Model,
    (from, into): ((Style, Sharding), (Style, Sharding)),
    tokens: &Range<u64>,
    scatter: Scatter,
) -> (Engine, Engine) {
    (filled(model, from, tokens, scatter), empty(model, into, tokens, scatter))
}

fn filled(
    model: Model,
    (style, sharding): (Style, Sharding),
    tokens: &Range<u64>,
    scatter: Scatter,
) -> Engine {
    let held = tokens.start.saturating_sub(9)..tokens.end + 5;
    let mut source = Engine::new(models::layout(model, style), sharding, all(&held), scatter);
    source.fill(all(&held));
    source
}

fn empty(
    model: Model,
    (style, sharding): (Style, Sharding),
    tokens: &Range<u64>,
    scatter: Scatter,
) -> Engine {
    Engine::new(models::layout(model, style), sharding, needed(tokens), scatter)
}

proptest! {
    #[test]
    fn every_byte_arrives_and_no_other_changes(
        model in models::models(),
        from in (models::styles(), models::shardings()),
        into in (models::styles(), models::shardings()),
        (start, count) in (prop_oneof![Just(0u64), 0..80u64], 0..90u64),
        scatter in models::scatters(),
        steps in prop_oneof![Just(Steps::Whole), Just(Steps::ByLayer)],
        rotation in 0..6u32,
    ) {
        let tokens = start..start + count;
        let (source, mut destination) = engines(model, (from, into), &tokens, scatter);
        check(&source, &mut destination, &tokens, (steps, rotation));
    }
}

/// The combinations that people run, each for certain: TP sizes × both orders × both arrangements × block sizes.
#[test]
fn the_usual_pairs_of_engines_are_byte_exact() {
    let shape = |heads, arrangement, block_tokens| Style { block_tokens, heads, arrangement, ..Style::PLAIN };
    let shapes = [
        shape(HeadOrder::Hnd, Arrangement::BlockMajor, 16),
        shape(HeadOrder::Nhd, Arrangement::LayerMajor, 16),
        shape(HeadOrder::Nhd, Arrangement::BlockMajor, 64),
        shape(HeadOrder::Hnd, Arrangement::LayerMajor, 8),
    ];
    let tp = |tp_size| Sharding { tp_size, stage_layers: vec![models::LAYERS] };
    let tokens = 45..70;
    let sizes = [(1, [4, 8]), (2, [2, 4]), (4, [1, 4]), (8, [1, 2])];
    for model in [Model::Gqa(4), Model::Sliding, Model::Mla, Model::State] {
        for ((from, others), a) in sizes.into_iter().flat_map(|size| shapes.map(|a| (size, a))) {
            let source = filled(model, (a, tp(from)), &tokens, Scatter::Shuffled(7));
            for (into, b) in others.into_iter().flat_map(|into| shapes.map(|b| (into, b))) {
                let mut destination = empty(model, (b, tp(into)), &tokens, Scatter::Shuffled(9));
                check(&source, &mut destination, &tokens, (Steps::Whole, 0));
            }
        }
    }
}

#[test]
fn layers_can_be_pulled_one_by_one_and_make_the_whole() {
    let sharding = |tp_size, stages: &[u32]| Sharding { tp_size, stage_layers: stages.to_vec() };
    for model in [Model::Gqa(4), Model::Sliding, Model::Mla, Model::State] {
        let sides = ((Style::PLAIN, sharding(2, &[6])), (Style::PLAIN, sharding(4, &[2, 4])));
        let (source, mut destination) = engines(model, sides, &(0..40), Scatter::Tight);
        let by_layer = check(&source, &mut destination, &(0..40), (Steps::ByLayer, 0));
        let bytes: u64 =
            (0..models::LAYERS).map(|layer| by_layer.layer(layer).map(|t| t.bytes()).sum::<u64>()).sum();
        assert_eq!(bytes, by_layer.bytes());
        assert!(by_layer.transfers.is_sorted_by_key(|transfer| transfer.layer));
        let whole = check(&source, &mut destination, &(0..40), (Steps::Whole, 0));
        assert_eq!(whole.bytes(), bytes);
        assert!(whole.layer(0).next().is_none());
    }
}

#[test]
fn a_destination_can_plan_for_itself_alone() {
    let sharding = |tp_size| Sharding { tp_size, stage_layers: vec![6] };
    let sides = ((Style::PLAIN, sharding(4)), (Style::PLAIN, sharding(2)));
    let (source, destination) = engines(Model::Gqa(4), sides, &(0..50), Scatter::Shuffled(1));
    let (from, into) = (source.pools(), destination.pools());
    let request = |from, into| Request {
        source: source.side(from),
        destination: destination.side(into),
        tokens: 0..50,
        steps: Steps::Whole,
        rotation: 0,
        pieces_max: PIECES_MAX,
    };
    let all = plan(&request(&from[..], &into[..])).unwrap();
    let alone = plan(&request(&from[2..], &into[1..])).unwrap();
    assert_eq!(alone.transfers, all.destination(1).cloned().collect::<Vec<_>>());
    assert_eq!(alone.transfers.iter().map(|transfer| transfer.source).collect::<Vec<_>>(), [2, 3]);
}
