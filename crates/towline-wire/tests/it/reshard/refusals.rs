//! What no copying can do, what is out of bounds, and what is not given: each an error that names it.

use proptest::prelude::*;
use towline_wire::layout::{GroupKind, KvLayout, Split};
use towline_wire::reshard::{Array, End, PIECES_MAX, Plan, Request, ReshardError, Steps, TOKENS_MAX, plan};
use towline_wire::shard::Sharding;

use super::models::{self, Model, Style};
use super::oracle::{Engine, Scatter, all};

/// Two ranks to one, 40 tokens, whatever `change` makes of source and destination.
fn planned(model: Model, change: impl Fn(&mut Engine, &mut Engine)) -> Result<Plan, ReshardError> {
    let engine = |tp_size| {
        let sharding = Sharding { tp_size, stage_layers: vec![models::LAYERS] };
        Engine::new(models::layout(model, Style::PLAIN), sharding, all(&(0..40)), Scatter::Tight)
    };
    let (mut source, mut destination) = (engine(2), engine(1));
    change(&mut source, &mut destination);
    let (from, into) = (source.pools(), destination.pools());
    plan(&Request {
        source: source.side(&from),
        destination: destination.side(&into),
        tokens: 0..40,
        steps: Steps::Whole,
        rotation: 0,
        pieces_max: PIECES_MAX,
    })
}

/// What [`ReshardError::Differs`] says when the source's layout is changed.
fn differs(model: Model, change: impl Fn(&mut KvLayout)) -> (usize, u32, String, &'static str) {
    match planned(model, |source, _| change(&mut source.layout)) {
        Err(ReshardError::Differs { group, layer, part, field, .. }) => (group, layer, part, field),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_needs_arithmetic_is_refused_by_group_layer_part_and_field() {
    let k = |field| (0, 0, "k".to_owned(), field);
    let gqa = Model::Gqa(4);
    assert_eq!(differs(gqa, |l| l.groups[0].parts[0].dtype = Some("f16".into())), k("dtype"));
    assert_eq!(differs(gqa, |l| l.groups[0].parts[0].dtype = None), k("dtype"));
    assert_eq!(differs(gqa, |l| l.groups[0].parts[0].element_bytes = 1), k("element bytes"));
    assert_eq!(differs(gqa, |l| l.groups[0].parts[0].bytes *= 2), k("bytes of a head"));
    assert_eq!(differs(gqa, |l| l.groups[0].parts[0].split = Split::Heads(2)), k("heads"));
    assert_eq!(differs(gqa, |l| l.groups[0].parts[0].split = Split::Replicated), k("heads"));
    assert_eq!(differs(gqa, |l| l.groups[0].kind = GroupKind::Mla), k("kind"));
    let v = (0, 0, "v".to_owned(), "dtype");
    assert_eq!(differs(gqa, |l| l.groups[0].parts[1].dtype = None), v);
    let window = GroupKind::SlidingWindow { window_tokens: 5 };
    assert_eq!(differs(Model::Sliding, |l| l.groups[0].kind = window), k("window"));
    let full = (1, 1, "k".to_owned(), "kind");
    assert_eq!(differs(Model::Sliding, |l| l.groups[1].kind = window), full);
}

#[test]
fn a_source_that_keeps_all_tokens_serves_a_window() {
    let plan = planned(Model::Sliding, |source, _| source.layout.groups[0].kind = GroupKind::Full);
    assert!(plan.is_ok(), "{plan:?}");
}

#[test]
fn missing_layers_and_parts_are_named() {
    let missing = |end, layer, part: &str| Err(ReshardError::Missing { end, layer, part: part.into() });
    let gqa = Model::Gqa(4);
    let part = planned(gqa, |source, _| drop(source.layout.groups[0].parts.pop()));
    assert_eq!(part, missing(End::Source, 0, "v"));
    let layer = planned(gqa, |_, destination| destination.layout.groups[0].layers.truncate(5));
    assert_eq!(layer, missing(End::Destination, 5, "k"));
}

#[test]
fn ranks_pools_and_blocks_that_do_not_fit_are_named() {
    type Change = fn(&mut Engine, &mut Engine);
    let cases: [(Change, &str); 12] = [
        (|s, _| drop(s.ranks.pop()), "rank 1 of the source is needed and not given"),
        (|_, d| d.sharding.tp_size = 3, "ranks: 4 heads cannot be shared by 3"),
        (|s, _| s.layout.groups[0].block_tokens = 0, "source's layout"),
        (|s, _| s.layout.groups.clear(), "1 to 16 groups"),
        (|s, _| drop(s.ranks[0].pools.pop()), "rank 0 of the source does not give one pool"),
        (|s, _| s.ranks[1].pools[0].arrays.clear(), "rank 1 of the source, group 0: it has not one array"),
        (|s, _| s.ranks[1].pools[0].arrays[0].stride -= 1, "stride is shorter"),
        (|s, _| s.ranks[1].pools[0].arrays[0].base += 1, "a block leaves the region"),
        (|s, _| s.ranks[1].pools[0].blocks[1] = u32::MAX, "a block leaves the region"),
        (|_, d| d.ranks[0].pools[0].blocks[1] = 0, "destination, group 0: its table names a block twice"),
        (|s, _| s.ranks[0].pools[0].blocks.truncate(2), "source, group 0: the sequence's block 2 is not"),
        (|_, d| d.ranks[0].pools[0].first_block = 1, "destination, group 0: the sequence's block 0 is not"),
    ];
    for (change, word) in cases {
        let error = planned(Model::Gqa(4), change).unwrap_err().to_string();
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[test]
fn ranges_that_are_none_are_refused_and_empty_ones_move_nothing() {
    let engine = Engine::new(
        models::layout(Model::State, Style::PLAIN),
        Sharding { tp_size: 1, stage_layers: vec![models::LAYERS] },
        all(&(0..40)),
        Scatter::Tight,
    );
    let pools = engine.pools();
    let planned = |start, end| {
        let side = engine.side(&pools);
        plan(&Request {
            source: side,
            destination: side,
            tokens: std::ops::Range { start, end },
            steps: Steps::Whole,
            rotation: 0,
            pieces_max: PIECES_MAX,
        })
    };
    assert_eq!(planned(2, 1), Err(ReshardError::Tokens { start: 2, end: 1 }));
    assert!(matches!(planned(0, TOKENS_MAX + 1), Err(ReshardError::Tokens { .. })));
    assert!(matches!(planned(0, TOKENS_MAX), Err(ReshardError::Block { .. })));
    assert_eq!(planned(7, 7), Ok(Plan::default()));
}

fn edges() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), Just(u64::MAX), Just(u64::MAX / 2), Just(0)]
}

proptest! {
    /// Arrays and tables come from a peer: whatever they say, no address overflows or leaves the region.
    #[test]
    fn no_arrays_or_tables_make_the_planner_panic(
        arrays in prop::collection::vec((edges(), edges()), 0..3),
        blocks in prop::collection::vec(any::<u32>(), 0..5),
        first_block: u32,
        small: bool,
    ) {
        let made = planned(Model::Gqa(4), |source, _| {
            let pool = &mut source.ranks[1].pools[0];
            pool.arrays = arrays
                .iter()
                .map(|(base, stride)| if small { (base % 1500, stride % 1500) } else { (*base, *stride) })
                .map(|(base, stride)| Array { base, stride })
                .collect();
            pool.blocks = if small { blocks.iter().map(|block| block % 3).collect() } else { blocks.clone() };
            pool.first_block = if small { 0 } else { first_block };
        });
        if let Ok(made) = made {
            for transfer in made.transfers {
                prop_assert!(transfer.merged(u64::MAX).is_ok());
            }
        }
    }
}
