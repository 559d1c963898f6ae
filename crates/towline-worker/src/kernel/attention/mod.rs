//! Attention over a paged cache: each block of K and V is read once for all the query rows that need it.
//!
//! Work is cut into *items*: one sequence, one KV head, a tile of consecutive query positions; the query heads of the
//! KV head's group all belong to the item. An item walks its blocks in ascending order, at most 16 tokens (a *chunk*)
//! at a time; the arithmetic of a row is in `softmax` and depends on its own position and nothing else.
//!
//! Long contexts are cut into *segments* of [`SEGMENT_TOKENS`] at absolute positions, whose partial results are merged
//! in ascending order. The cut is part of the arithmetic, so that one sequence's segments may go to different members:
//! a decoding sequence has only as many items as KV heads otherwise.
//!
//! Blocks are copied out of the cache by `Memory::read_into`, 2 KiB a head, into the member's scratch: the copy stays
//! in L1, costs a few per cent, and nothing is ever read through a reference into memory that a transfer may write.
//!
//! **Cost.** Decode at context c reads `c · kv_heads · head_dim · 4` bytes a layer: 23 KB a token of context over
//! SmolLM2's 30 layers, 47 MB at 2048, a third of the weights' 143 MB. Arithmetic: `2 · heads · head_dim` FMAs a token
//! and layer, sixteen at a time, after 128 shuffles a chunk that transpose K.
//!
//! **Measured** (2026-11-30, docs/benchmarks.md): decode at 2048 runs at 0.64 of its speed at 128 with AVX2. Two things
//! made it 0.5 before: scratch that began in the middle of a cache line (`aligned`), and asking for all of the next
//! chunk at once, more misses than a core keeps (`softmax`). Heads of a block are kept together, for its pages.
#![expect(unsafe_code, reason = "items write disjoint heads of one output")]

mod softmax;

use std::sync::Mutex;

use towline_fabric::Memory;

use super::Level;
use super::shared::Pieces;
use super::simd::LANES;
use super::team::Team;
use softmax::{Finish, Merge, Walk};

/// Query positions in an item: with a group of 3 heads, 24 rows share each chunk's conversion.
const TILE_POSITIONS: usize = 8;
/// Tokens whose softmax is computed as one, then merged.
pub const SEGMENT_TOKENS: usize = 256;

/// The numbers of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Dimensions of a head, a multiple of 16.
    pub head_dim: usize,
    /// Elements between two rows of queries; a row starts with `heads * head_dim` of them.
    pub query_stride: usize,
    /// Tokens in a block.
    pub block_tokens: usize,
}

/// One layer of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// The cache's memory.
    pub memory: &'a Memory,
    /// Bytes from one block to the next.
    pub block_bytes: u64,
    /// Where the layer's K starts in a block: `[kv_head][token][dim]` in f16, little-endian.
    pub k: u64,
    /// Where its V starts.
    pub v: u64,
}

/// Consecutive positions of one sequence, as rows of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Row of the first.
    pub first_row: usize,
    /// Position of the first.
    pub position: usize,
    /// How many.
    pub count: usize,
    /// The sequence's block table.
    pub blocks: &'a [u32],
}

/// One member's work: positions of one sequence under one KV head, over a range of segments.
#[derive(Clone, Copy)]
struct Item<'a> {
    rows: Rows<'a>,
    kv_head: usize,
    first_segment: usize,
    end_segment: usize,
    /// Where the unfinished state goes, when the item is one segment of several.
    partial: Option<usize>,
}

/// Buffers that live from step to step: one scratch a member, the unfinished states of split rows.
#[derive(Debug)]
pub struct Scratch {
    members: Vec<Mutex<softmax::Buffers>>,
    partials: Vec<f32>,
}

impl Scratch {
    /// For a team of `members`.
    pub fn new(members: usize) -> Self {
        Self { members: (0..members).map(|_| Mutex::default()).collect(), partials: Vec::new() }
    }
}

/// The operands of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Instructions to use.
    pub level: Level,
    /// Sizes.
    pub shape: Shape,
    /// K and V.
    pub layer: Layer<'a>,
    /// Queries, already rotated: `[row][query_stride]`.
    pub queries: &'a [f32],
}

impl Attention<'_> {
    /// Attends for all `rows`; `out` is `[row][heads * head_dim]`.
    ///
    /// # Panics
    /// If a block table is too short or a block lies outside the memory: the caller has checked the batch.
    pub fn run(&self, team: &mut Team, scratch: &mut Scratch, rows: &[Rows<'_>], out: &mut [f32]) {
        let (items, partials) = self.items(rows);
        let state = self.group() * (self.shape.head_dim + 2);
        scratch.partials.resize(partials * state, 0.0);
        let pieces = Pieces::new(out);
        let halves = Pieces::new(&mut scratch.partials);
        let buffers = &scratch.members;
        // The heads of a block share its pages and lie next to each other: one member takes them all, if that leaves
        // work for the others.
        let together =
            if items.len() >= 2 * team.members() * self.shape.kv_heads { self.shape.kv_heads } else { 1 };
        team.run(|member, members| {
            let mut buffers = buffers[member].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            for item in items.chunks(together).skip(member).step_by(members).flatten() {
                let walk = self.level.run(Walk { attention: self, item, buffers: &mut buffers });
                match item.partial {
                    // SAFETY: each split item has a slot of its own.
                    Some(slot) => walk.save(unsafe { halves.piece(slot * state..(slot + 1) * state) }),
                    None => self.finish(&walk, item, &pieces),
                }
            }
        });
        self.merge(&items, scratch, &pieces);
    }

    /// Query heads that share a KV head.
    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Cuts the rows; also returns how many items are unfinished. Single rows are split by segment, tiles aren't:
    /// there are enough of those.
    fn items<'a>(&self, rows: &[Rows<'a>]) -> (Vec<Item<'a>>, usize) {
        let (mut items, mut partials) = (Vec::new(), 0);
        for rows in rows {
            for start in (0..rows.count).step_by(TILE_POSITIONS) {
                let count = TILE_POSITIONS.min(rows.count - start);
                let tile = Rows {
                    first_row: rows.first_row + start,
                    position: rows.position + start,
                    count,
                    ..*rows
                };
                let segments = (tile.position + count).div_ceil(SEGMENT_TOKENS);
                // One item a head, or one a segment and head.
                let split = count == 1 && segments > 1;
                for cut in 0..if split { segments } else { 1 } {
                    for kv_head in 0..self.shape.kv_heads {
                        let (first_segment, end_segment) = if split { (cut, cut + 1) } else { (0, segments) };
                        let partial = split.then_some(partials);
                        partials += usize::from(split);
                        items.push(Item { rows: tile, kv_head, first_segment, end_segment, partial });
                    }
                }
            }
        }
        (items, partials)
    }

    /// Writes an item's rows, divided by their sums.
    fn finish(&self, walk: &softmax::States<'_>, item: &Item<'_>, out: &Pieces<'_, f32>) {
        let width = self.group() * self.shape.head_dim;
        for index in 0..item.rows.count {
            let start =
                (item.rows.first_row + index) * self.shape.heads * self.shape.head_dim + item.kv_head * width;
            // SAFETY: the heads of one KV head's group in one row belong to one item, or to the merge of its segments.
            let piece = unsafe { out.piece(start..start + width) };
            self.level.run(Finish { states: walk.rows(index * self.group(), self.group()), out: piece });
        }
    }

    /// Joins the segments of split rows in ascending order, on the caller: a few thousand operations a sequence.
    fn merge(&self, items: &[Item<'_>], scratch: &mut Scratch, out: &Pieces<'_, f32>) {
        let state = self.group() * (self.shape.head_dim + 2);
        let mut total = softmax::Buffers::default();
        for item in
            (0..self.shape.kv_heads).flat_map(|head| items.iter().filter(move |item| item.kv_head == head))
        {
            let Some(slot) = item.partial else { continue };
            let partial = &scratch.partials[slot * state..(slot + 1) * state];
            let first = item.first_segment == 0;
            self.level.run(Merge { attention: self, partial, total: &mut total, first });
            if item.end_segment == (item.rows.position + 1).div_ceil(SEGMENT_TOKENS) {
                self.finish(&total.totals(self.group(), self.shape.head_dim), item, out);
            }
        }
    }
}

/// Tokens of a chunk that a row at `position` sees, for a chunk that starts at `start`.
#[inline(always)]
fn visible(position: usize, start: usize) -> usize {
    (position + 1).saturating_sub(start).min(LANES)
}
