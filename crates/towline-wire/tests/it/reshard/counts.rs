//! How few pieces a plan has, and who reads from whom.

use std::ops::Range;

use towline_wire::layout::{Arrangement, Gqa, HeadOrder, KvLayout};
use towline_wire::reshard::{PIECES_MAX, Plan, Request, ReshardError, Steps, plan};
use towline_wire::shard::Sharding;

use super::models::{self, Model, Style};
use super::oracle::{Engine, Scatter, all};

/// Plans from `tp.0` ranks in the first style to `tp.1` in the second.
fn planned(model: Model, (from, into): (Style, Style), tp: (u32, u32), tokens: Range<u64>) -> Plan {
    let engine = |style, tp_size| {
        let sharding = Sharding { tp_size, stage_layers: vec![models::LAYERS] };
        Engine::new(models::layout(model, style), sharding, all(&tokens), Scatter::Tight)
    };
    let (source, destination) = (engine(from, tp.0), engine(into, tp.1));
    let (from, into) = (source.pools(), destination.pools());
    plan(&request((source.side(&from), destination.side(&into)), tokens.clone())).unwrap()
}

fn request<'a>(
    (source, destination): (towline_wire::reshard::Side<'a>, towline_wire::reshard::Side<'a>),
    tokens: Range<u64>,
) -> Request<'a> {
    Request { source, destination, tokens, steps: Steps::Whole, rotation: 0, pieces_max: PIECES_MAX }
}

/// Runs of each transfer once merged: how many, and of which length.
fn runs(plan: &Plan) -> Vec<(usize, u64)> {
    let one = |transfer: &towline_wire::reshard::Transfer| {
        let runs = transfer.merged(u64::MAX).unwrap();
        let len = runs[0].len;
        assert!(runs.iter().all(|run| run.len == len), "{runs:?}");
        (runs.len(), len)
    };
    plan.transfers.iter().map(one).collect()
}

fn pairs(plan: &Plan) -> Vec<(u32, u32)> {
    plan.transfers.iter().map(|transfer| (transfer.destination, transfer.source)).collect()
}

fn layer_major(heads: HeadOrder) -> Style {
    Style { arrangement: Arrangement::LayerMajor, heads, ..Style::PLAIN }
}

const NHD: Style = Style { heads: HeadOrder::Nhd, ..Style::PLAIN };
const SMALL: Style = Style { block_tokens: 8, ..Style::PLAIN };
/// Bytes of K and V of a head of a token in [`Model::Gqa`].
const HEAD: u64 = 4 + 6;

#[test]
fn equal_engines_with_neighbouring_blocks_move_one_run_a_rank() {
    let plain = (Style::PLAIN, Style::PLAIN);
    assert_eq!(runs(&planned(Model::Gqa(8), plain, (1, 1), 0..160)), [(1, 160 * 6 * 8 * HEAD)]);
    assert_eq!(runs(&planned(Model::Gqa(8), plain, (2, 2), 0..160)), [(1, 160 * 6 * 4 * HEAD); 2]);
    assert_eq!(runs(&planned(Model::Mla, plain, (2, 2), 0..160)), [(1, 160 * 6 * 17); 2]);
    let layers = (layer_major(HeadOrder::Hnd), layer_major(HeadOrder::Hnd));
    let plan = planned(Model::Gqa(8), layers, (1, 1), 0..160);
    assert_eq!(plan.transfers[0].merged(u64::MAX).unwrap().len(), 6 * 2, "one for each array");
}

#[test]
fn four_ranks_to_one_is_a_run_a_block_in_hnd_and_a_run_a_token_in_nhd() {
    // Of K (4 bytes) and V (6): 6 layers × 10 blocks each, or × 160 tokens each; two heads of each rank.
    let count = |plan: &Plan| plan.transfers[0].merged(u64::MAX).unwrap().len();
    let hnd = planned(Model::Gqa(8), (Style::PLAIN, Style::PLAIN), (4, 1), 0..160);
    assert_eq!((count(&hnd), hnd.pieces()), (6 * 2 * 10, 4 * 6 * 2 * 10));
    let nhd = planned(Model::Gqa(8), (NHD, NHD), (4, 1), 0..160);
    assert_eq!((count(&nhd), nhd.pieces()), (6 * 2 * 160, 4 * 6 * 2 * 160));
    let mixed = planned(Model::Gqa(8), (NHD, Style::PLAIN), (4, 1), 0..160);
    assert_eq!((count(&mixed), mixed.pieces()), (6 * 2 * 160 * 2, 4 * 6 * 2 * 160 * 2));
    assert!([hnd, nhd, mixed].iter().all(|plan| plan.transfers.iter().all(|t| t.runs.is_empty())));
}

#[test]
fn unequal_blocks_are_a_run_a_head_and_smaller_block_in_hnd() {
    let hnd = planned(Model::Gqa(8), (SMALL, Style::PLAIN), (1, 1), 0..160);
    // The last head of a block's last part, second half, and the first of the next block, first half, touch.
    assert_eq!((hnd.pieces(), hnd.transfers[0].lists.len()), (6 * 2 * 8 * 20 - 9, 0));
    let nhd = Style { block_tokens: 8, ..layer_major(HeadOrder::Nhd) };
    let nhd = planned(Model::Gqa(8), (nhd, layer_major(HeadOrder::Nhd)), (1, 1), 0..160);
    assert_eq!(nhd.pieces(), 1, "tokens follow each other through all blocks and arrays");
}

#[test]
fn the_bound_on_pieces_holds_for_lists_and_runs_alike() {
    let engine = |style, tp_size| {
        let sharding = Sharding { tp_size, stage_layers: vec![models::LAYERS] };
        Engine::new(models::layout(Model::Gqa(8), style), sharding, all(&(0..160)), Scatter::Tight)
    };
    let destination = engine(Style::PLAIN, 1);
    for source in [engine(Style::PLAIN, 2), engine(SMALL, 2), engine(NHD, 2), engine(SMALL, 1)] {
        let (from, into) = (source.pools(), destination.pools());
        let request = request((source.side(&from), destination.side(&into)), 0..160);
        let pieces = plan(&request).unwrap().pieces();
        // Runs count before they merge, so a bound just met by the result may still refuse.
        assert!(plan(&Request { pieces_max: pieces + 9, ..request.clone() }).is_ok());
        let refused = plan(&Request { pieces_max: pieces - 1, ..request });
        assert_eq!(refused, Err(ReshardError::Pieces { pieces_max: pieces - 1 }));
    }
}

#[test]
fn a_partial_last_block_adds_only_its_own_runs() {
    let plan = planned(Model::Gqa(8), (Style::PLAIN, Style::PLAIN), (1, 1), 0..(160 + 3));
    let transfer = &plan.transfers[0];
    assert_eq!((transfer.lists.len(), transfer.runs.len()), (1, 6 * 2 * 8));
    assert_eq!((transfer.lists[0].local.bases.len(), transfer.lists[0].local.indices.len()), (1, 10));
    assert!(transfer.runs.iter().all(|run| run.len == 3 * 4 || run.len == 3 * 6));
}

#[test]
fn a_window_moves_only_its_tokens() {
    let scales = 4 + 4;
    let token = 4 * (3 + 2) + scales;
    let plan = planned(Model::Sliding, (Style::PLAIN, Style::PLAIN), (1, 1), 0..100);
    assert_eq!(plan.bytes(), 3 * token * (100 + u64::from(models::WINDOW)));
}

#[test]
fn replicas_are_read_by_peers_or_by_whoever_is_nearest() {
    let plain = (Style::PLAIN, Style::PLAIN);
    let read = |model, tp| pairs(&planned(model, plain, tp, 0..16));
    assert_eq!(read(Model::Mla, (2, 2)), [(0, 0), (1, 1)]);
    assert_eq!(read(Model::Mla, (2, 4)), [(0, 0), (1, 0), (2, 1), (3, 1)]);
    assert_eq!(read(Model::Mla, (4, 2)), [(0, 0), (1, 2)]);
    assert_eq!(read(Model::Gqa(2), (8, 8)), (0..8).map(|rank| (rank, rank)).collect::<Vec<_>>());
    assert_eq!(read(Model::Gqa(2), (8, 1)), [(0, 0), (0, 4)]);
    assert_eq!(read(Model::Gqa(2), (2, 8)), (0..8).map(|rank| (rank, rank / 4)).collect::<Vec<_>>());
    assert_eq!(read(Model::Gqa(8), (2, 4)), [(0, 0), (1, 0), (2, 1), (3, 1)]);
    assert_eq!(read(Model::Gqa(8), (4, 1)), [(0, 0), (0, 1), (0, 2), (0, 3)]);
}

/// Memory of a Llama-3.1-8B rank: one array of all blocks.
#[test]
fn the_cost_in_the_head_of_the_module_is_that_of_llama() {
    use towline_wire::reshard::{Array, GroupPool, RankPool, Side};
    let tokens = 8000;
    let blocks: Vec<u32> = (0..500).map(|block| block * 7 % 500).collect();
    let shape = Gqa { layers: 32, kv_heads: 8, head_dim: 128, element_bytes: 2, block_tokens: 16 };
    let made = |heads, tp_size| {
        let mut layout = KvLayout::gqa(shape);
        layout.groups[0].heads = heads;
        let one = Sharding { tp_size: 1, stage_layers: vec![32] };
        let many = Sharding { tp_size, stage_layers: vec![32] };
        let whole = layout.groups[0].block_bytes();
        let arrays = |ranks| [Array { base: 0, stride: whole / ranks }];
        let (ours, theirs) = (arrays(1), arrays(u64::from(tp_size)));
        let pool = |rank, arrays| RankPool {
            rank,
            region_bytes: 500 * whole,
            groups: vec![GroupPool { arrays, first_block: 0, blocks: &blocks }],
        };
        let (into, from) =
            ([pool(0, &ours[..])], (0..tp_size).map(|rank| pool(rank, &theirs[..])).collect::<Vec<_>>());
        let source = Side { layout: &layout, sharding: &many, ranks: &from };
        let destination = Side { layout: &layout, sharding: &one, ranks: &into };
        let request = request((source, destination), 0..tokens);
        let refused = plan(&Request { pieces_max: 100, ..request.clone() });
        assert_eq!(refused.unwrap_err(), ReshardError::Pieces { pieces_max: 100 });
        plan(&request).unwrap()
    };
    let lists = |plan: &Plan| {
        let lists = plan.transfers.iter().flat_map(|transfer| &transfer.lists);
        lists.map(|pair| (pair.local.bases.len(), pair.local.indices.len(), pair.local.block_bytes)).collect()
    };
    let hnd = made(HeadOrder::Hnd, 4);
    assert_eq!((hnd.pieces(), hnd.bytes()), (128_000, 8000 * 131_072));
    let found: Vec<_> = lists(&hnd);
    assert_eq!(found, [(64, 500, 8192); 4]);
    let nhd = made(HeadOrder::Nhd, 4);
    assert_eq!((nhd.pieces(), nhd.bytes()), (2_048_000, 8000 * 131_072));
    let found: Vec<_> = lists(&nhd);
    assert_eq!(found, [(1024, 500, 512); 4]);
    let equal: Vec<_> = lists(&made(HeadOrder::Nhd, 1));
    assert_eq!(equal, [(1, 500, 2 << 20)]);
}
