//! The arithmetic of a row: online softmax, chunk by chunk.
//!
//! A row keeps the largest score so far, the sum of the exponentials and the V they weight (Milakov and Gimelshein
//! 2018). A chunk's scores are Σ over dimensions in ascending order, even and odd apart, a lane a token: K is
//! transposed once for all rows, so nothing is summed across lanes. Lanes beyond a row's position are replaced
//! *after* the product, and V is added token by token up to the position, so whatever lies behind it cannot matter.
//! Rescaling is by exactly 1 where the maximum stays.
#![expect(unsafe_code, reason = "takes addresses in the cache to prefetch them")]

use super::super::Kernel;
use super::super::aligned::Aligned;
use super::super::simd::{Half, LANES, Simd};
use super::{Attention, Item, SEGMENT_TOKENS, visible};

/// Rows whose scores are computed together: each load of K serves them all.
const TOGETHER: usize = 4;

/// A member's scratch; grows to the largest item and stays.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    bytes: Aligned<u8>,
    /// `[dim][16 tokens]`.
    keys: Aligned<f32>,
    /// `[16 tokens][dim]`.
    values: Aligned<f32>,
    /// Scaled queries: for each four rows `[pair of dims][row]`.
    queries: Vec<[f32; 2]>,
    /// The rows within the current segment.
    segment: State,
    /// The rows over all segments before.
    total: State,
}

/// Running softmax of several rows.
#[derive(Debug, Default)]
struct State {
    largest: Vec<f32>,
    sum: Vec<f32>,
    /// `[row][dim]`.
    weighted: Aligned<f32>,
}

impl State {
    fn clear(&mut self, rows: usize, dim: usize) {
        self.largest.clear();
        self.largest.resize(rows, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(rows, 0.0);
        self.weighted.resize(rows * dim);
        self.weighted.fill(0.0);
    }
}

/// Finished or partial rows of an item.
#[derive(Clone, Copy)]
pub(super) struct States<'a> {
    largest: &'a [f32],
    sum: &'a [f32],
    /// `[row][dim]`.
    weighted: &'a [f32],
}

impl<'a> States<'a> {
    /// `count` rows from `first`.
    pub(super) fn rows(&self, first: usize, count: usize) -> States<'a> {
        let dim = self.weighted.len() / self.sum.len().max(1);
        States {
            largest: &self.largest[first..first + count],
            sum: &self.sum[first..first + count],
            weighted: &self.weighted[first * dim..(first + count) * dim],
        }
    }

    /// Copies the rows to a slot: all largest, all sums, all weighted V.
    pub(super) fn save(&self, slot: &mut [f32]) {
        let parts = [self.largest, self.sum, self.weighted];
        slot.iter_mut().zip(parts.into_iter().flatten()).for_each(|(to, from)| *to = *from);
    }
}

impl Buffers {
    /// The rows merged so far.
    pub(super) fn totals(&self, rows: usize, head_dim: usize) -> States<'_> {
        let total = &self.total;
        States {
            largest: &total.largest[..rows],
            sum: &total.sum[..rows],
            weighted: &total.weighted[..rows * head_dim],
        }
    }
}

/// Runs an item and leaves its rows in the buffers' totals.
pub(super) struct Walk<'a, 'b> {
    pub(super) attention: &'a Attention<'a>,
    pub(super) item: &'a Item<'a>,
    pub(super) buffers: &'b mut Buffers,
}

impl<'b> Kernel for Walk<'_, 'b> {
    type Output = States<'b>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> States<'b> {
        let shape = self.attention.shape;
        let (group, dim) = (shape.heads / shape.kv_heads, shape.head_dim);
        let rows = self.item.rows.count * group;
        let buffers = self.buffers;
        buffers.prepare(self.attention, self.item);
        let last = self.item.rows.position + self.item.rows.count - 1;
        buffers.total.clear(rows, dim);
        for segment in self.item.first_segment..self.item.end_segment {
            buffers.segment.clear(rows, dim);
            let end = ((segment + 1) * SEGMENT_TOKENS).min(last + 1);
            let mut start = chunk_at_or_after(segment * SEGMENT_TOKENS, shape.block_tokens);
            while start < end {
                let tokens = LANES.min(shape.block_tokens - start % shape.block_tokens);
                let next = start + tokens;
                let mut ahead = if next <= last {
                    let count = visible(last, next).min(shape.block_tokens - next % shape.block_tokens);
                    Ahead::new(self.attention, self.item, (next, count))
                } else {
                    Ahead::default()
                };
                let seen = visible(last, start).min(tokens);
                buffers.load(simd, (self.attention, self.item), (start, seen), &mut ahead);
                buffers.chunk(simd, (self.item.rows.position, group), (start, tokens), &mut ahead);
                ahead.ask_rest(simd);
                start += tokens;
            }
            merge(simd, &mut buffers.total, &buffers.segment, dim);
        }
        buffers.totals(rows, shape.head_dim)
    }
}

/// First chunk boundary at or after `position`: chunks start every 16 tokens within a block. A chunk belongs to the
/// segment of its first token.
fn chunk_at_or_after(position: usize, block_tokens: usize) -> usize {
    let block = position / block_tokens * block_tokens;
    (block + (position - block).next_multiple_of(LANES)).min(block + block_tokens)
}

impl Buffers {
    /// Sizes the buffers and packs the item's queries, scaled by 1/sqrt(head_dim).
    fn prepare(&mut self, attention: &Attention<'_>, item: &Item<'_>) {
        let shape = attention.shape;
        let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        self.bytes.resize(2 * dim * LANES);
        self.keys.resize(dim * LANES);
        self.values.resize(dim * LANES);
        let scale = 1.0 / (dim as f32).sqrt();
        let rows = item.rows.count * group;
        self.queries.clear();
        self.queries.resize(rows * dim / 2, [0.0; 2]);
        for row in 0..rows {
            let at = (item.rows.first_row + row / group) * shape.query_stride
                + (item.kv_head * group + row % group) * dim;
            let (first, together) =
                (row / TOGETHER * TOGETHER, TOGETHER.min(rows - row / TOGETHER * TOGETHER));
            let packed = self.queries[first * dim / 2 + row - first..].iter_mut().step_by(together);
            for (to, from) in packed.zip(attention.queries[at..at + dim].as_chunks::<2>().0) {
                *to = [from[0] * scale, from[1] * scale];
            }
        }
    }

    /// Copies `count` tokens of K and V from position `start` on and converts them to f32, K transposed.
    #[inline(always)]
    fn load<S: Simd>(
        &mut self,
        simd: S,
        (attention, item): (&Attention<'_>, &Item<'_>),
        (start, count): (usize, usize),
        ahead: &mut Ahead<'_>,
    ) {
        let (dim, layer) = (attention.shape.head_dim, attention.layer);
        let at = chunk_offset(attention, item, start);
        let bytes = count * dim * size_of::<Half>();
        read(attention, at + layer.k, &mut self.bytes[..bytes]);
        ahead.ask(simd);
        let halves: &[Half] = self.bytes.as_chunks().0;
        simd.transpose_halves(halves, dim, self.keys.as_chunks_mut().0);
        ahead.ask(simd);
        read(attention, at + layer.v, &mut self.bytes[..bytes]);
        ahead.ask(simd);
        let halves: &[Half] = self.bytes[..bytes].as_chunks().0;
        let values = self.values.as_chunks_mut::<LANES>().0;
        for (values, halves) in values.chunks_mut(LANES).zip(halves.as_chunks::<LANES>().0.chunks(LANES)) {
            for (values, halves) in values.iter_mut().zip(halves) {
                simd.store(simd.load_half(halves), values);
            }
            ahead.ask(simd);
        }
    }

    /// Takes a chunk of `tokens` from `start` on into every row of the segment that sees it.
    #[inline(always)]
    fn chunk<S: Simd>(
        &mut self,
        simd: S,
        (position, group): (usize, usize),
        (start, tokens): (usize, usize),
        ahead: &mut Ahead<'_>,
    ) {
        let rows = self.segment.sum.len();
        let (keys, values) = (self.keys.as_chunks().0, self.values.as_chunks().0);
        let pairs = keys.len() / 2;
        for first in (0..rows).step_by(TOGETHER) {
            let together = TOGETHER.min(rows - first);
            let queries = &self.queries[first * pairs..(first + together) * pairs];
            let mut scores = [[0.0; LANES]; TOGETHER];
            match together {
                1 => score::<S, 1>(simd, queries, keys, &mut scores),
                2 => score::<S, 2>(simd, queries, keys, &mut scores),
                3 => score::<S, 3>(simd, queries, keys, &mut scores),
                _ => score::<S, TOGETHER>(simd, queries, keys, &mut scores),
            }
            for (row, scores) in (first..first + together).zip(&scores) {
                let seen = visible(position + row / group, start).min(tokens);
                if seen > 0 {
                    absorb(simd, &mut self.segment, row, (scores, seen), values);
                }
                ahead.ask(simd);
            }
        }
    }
}

/// Where a chunk of the item's head starts in a part, in bytes from the part of block 0.
fn chunk_offset(attention: &Attention<'_>, item: &Item<'_>, start: usize) -> u64 {
    let shape = attention.shape;
    let block = u64::from(item.rows.blocks[start / shape.block_tokens]) * attention.layer.block_bytes;
    let token = item.kv_head * shape.block_tokens + start % shape.block_tokens;
    block + (token * shape.head_dim * size_of::<Half>()) as u64
}

/// The next chunk's lines, asked for a few at a time while this one is computed.
///
/// The cache is far larger than what 4 KiB pages' translations cover, and the processor's own prefetchers stop at pages:
/// without this a long context is three times slower. A few at a time, because a core keeps 10 to 24 misses and waits
/// when it is asked for more.
#[derive(Default)]
struct Ahead<'a> {
    parts: [&'a [u8]; 2],
}

/// Lines asked for at once.
const LINES: usize = 8;

impl<'a> Ahead<'a> {
    fn new(attention: &'a Attention<'_>, item: &Item<'_>, (start, count): (usize, usize)) -> Self {
        let at = chunk_offset(attention, item, start);
        let bytes = (count * attention.shape.head_dim * size_of::<Half>()) as u64;
        let part = |part: u64| {
            // SAFETY: the block is in the table of a sequence in this step, so nothing writes it now; nothing is read
            // either.
            unsafe { attention.layer.memory.bytes(at + part..at + part + bytes) }.unwrap_or_default()
        };
        Self { parts: [part(attention.layer.k), part(attention.layer.v)] }
    }

    /// What heads of more than 64 dimensions leave over: the places to ask grow slower than the lines.
    #[inline(always)]
    fn ask_rest<S: Simd>(&mut self, simd: S) {
        while !self.parts[1].is_empty() {
            self.ask(simd);
        }
    }

    #[inline(always)]
    fn ask<S: Simd>(&mut self, simd: S) {
        let [keys, values] = &mut self.parts;
        let part = if keys.is_empty() { values } else { keys };
        let (now, later) = part.split_at(part.len().min(LINES * 64));
        *part = later;
        for line in now.chunks(64) {
            simd.prefetch(line);
        }
    }
}

#[inline(always)]
fn read(attention: &Attention<'_>, at: u64, into: &mut [u8]) {
    let read = attention.layer.memory.read_into(at, into);
    assert!(read.is_ok(), "a block lies outside the cache: the batch was not checked");
}

/// Scores of R rows: `[row][token]`.
#[inline(always)]
fn score<S: Simd, const R: usize>(
    simd: S,
    queries: &[[f32; 2]],
    keys: &[[f32; LANES]],
    out: &mut [[f32; LANES]; TOGETHER],
) {
    let (mut even, mut odd) = ([simd.splat(0.0); R], [simd.splat(0.0); R]);
    for (queries, keys) in queries.as_chunks::<R>().0.iter().zip(keys.as_chunks::<2>().0) {
        let (even_key, odd_key) = (simd.load(&keys[0]), simd.load(&keys[1]));
        for ((even, odd), query) in even.iter_mut().zip(&mut odd).zip(queries) {
            *even = simd.fma(simd.splat(query[0]), even_key, *even);
            *odd = simd.fma(simd.splat(query[1]), odd_key, *odd);
        }
    }
    for ((even, odd), out) in even.into_iter().zip(odd).zip(out) {
        simd.store(simd.add(even, odd), out);
    }
}

/// Takes the first `seen` tokens of a chunk into one row.
#[inline(always)]
fn absorb<S: Simd>(
    simd: S,
    state: &mut State,
    row: usize,
    (scores, seen): (&[f32; LANES], usize),
    values: &[[f32; LANES]],
) {
    let vectors = values.len() / LANES;
    let scores = simd.first(seen, simd.load(scores), simd.splat(f32::NEG_INFINITY));
    let before = state.largest[row];
    let here = simd.largest(scores);
    let largest = if here > before { here } else { before };
    let rescale = decay(simd, before, largest);
    let weights = simd.exp(simd.sub(scores, simd.splat(largest)));
    let weights = simd.first(seen, weights, simd.splat(0.0));
    state.largest[row] = largest;
    state.sum[row] = state.sum[row] * rescale + simd.sum(weights);
    let mut weight = [0.0; LANES];
    simd.store(weights, &mut weight);
    let rescale = simd.splat(rescale);
    let weighted = &mut state.weighted.as_chunks_mut().0[row * vectors..(row + 1) * vectors];
    let (fours, rest) = weighted.as_chunks_mut::<4>();
    for (index, four) in fours.iter_mut().enumerate() {
        gather::<S, 4>(simd, four, (rescale, &weight[..seen]), (&values[4 * index..], vectors));
    }
    let done = vectors - rest.len();
    for (index, one) in rest.as_chunks_mut::<1>().0.iter_mut().enumerate() {
        gather::<S, 1>(simd, one, (rescale, &weight[..seen]), (&values[done + index..], vectors));
    }
}

/// `to = to · rescale + Σ_tokens weight · V`, over N vectors of dimensions.
#[inline(always)]
fn gather<S: Simd, const N: usize>(
    simd: S,
    to: &mut [[f32; LANES]; N],
    (rescale, weights): (S::F, &[f32]),
    (values, stride): (&[[f32; LANES]], usize),
) {
    let mut sums = [rescale; N];
    for (sum, to) in sums.iter_mut().zip(&*to) {
        *sum = simd.mul(simd.load(to), rescale);
    }
    for (weight, values) in weights.iter().zip(values.chunks(stride)) {
        let weight = simd.splat(*weight);
        let Some(values) = values.first_chunk::<N>() else { break };
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = simd.fma(weight, simd.load(value), *sum);
        }
    }
    for (sum, to) in sums.into_iter().zip(to) {
        simd.store(sum, to);
    }
}

/// e^(from - to), exactly 1 where they are equal.
#[inline(always)]
fn decay<S: Simd>(simd: S, from: f32, to: f32) -> f32 {
    if from == to {
        return 1.0;
    }
    let mut lanes = [0.0; LANES];
    simd.store(simd.exp(simd.splat(from - to)), &mut lanes);
    lanes[0]
}

/// Merges a later segment into the total. A row that has seen nothing yet takes the segment as it is.
#[inline(always)]
fn merge<S: Simd>(simd: S, total: &mut State, segment: &State, dim: usize) {
    for row in 0..segment.sum.len() {
        if segment.sum[row] == 0.0 {
            continue;
        }
        let range = row * dim..(row + 1) * dim;
        if total.sum[row] == 0.0 {
            (total.largest[row], total.sum[row]) = (segment.largest[row], segment.sum[row]);
            total.weighted[range.clone()].copy_from_slice(&segment.weighted[range]);
            continue;
        }
        let (before, here) = (total.largest[row], segment.largest[row]);
        let largest = if here > before { here } else { before };
        let (old, new) = (decay(simd, before, largest), decay(simd, here, largest));
        total.largest[row] = largest;
        total.sum[row] = total.sum[row] * old + segment.sum[row] * new;
        let (old, new) = (simd.splat(old), simd.splat(new));
        let to = total.weighted[range.clone()].as_chunks_mut().0;
        for (to, from) in to.iter_mut().zip(segment.weighted[range].as_chunks().0) {
            let kept = simd.mul(simd.load(to), old);
            simd.store(simd.fma(simd.load(from), new, kept), to);
        }
    }
}

/// Merges a saved segment into a total.
pub(super) struct Merge<'a, 'b> {
    pub(super) attention: &'a Attention<'a>,
    pub(super) partial: &'a [f32],
    pub(super) total: &'b mut Buffers,
    /// Whether this is the row's first segment: the total starts anew.
    pub(super) first: bool,
}

impl Kernel for Merge<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let shape = self.attention.shape;
        let (rows, dim) = (shape.heads / shape.kv_heads, shape.head_dim);
        if self.first {
            self.total.total.clear(rows, dim);
        }
        let segment = &mut self.total.segment;
        segment.clear(rows, dim);
        segment.largest.copy_from_slice(&self.partial[..rows]);
        segment.sum.copy_from_slice(&self.partial[rows..2 * rows]);
        segment.weighted.copy_from_slice(&self.partial[2 * rows..]);
        merge(simd, &mut self.total.total, segment, dim);
    }
}

/// Divides rows by their sums: `out` is `[row][dim]`.
pub(super) struct Finish<'a, 'b> {
    pub(super) states: States<'a>,
    pub(super) out: &'b mut [f32],
}

impl Kernel for Finish<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let dim = self.states.weighted.len() / self.states.sum.len().max(1);
        let rows = self.states.weighted.chunks_exact(dim.max(1)).zip(self.states.sum);
        for ((weighted, sum), out) in rows.zip(self.out.chunks_exact_mut(dim.max(1))) {
            let inverse = simd.splat(1.0 / sum);
            for (weighted, out) in weighted.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
                simd.store(simd.mul(simd.load(weighted), inverse), out);
            }
        }
    }
}
