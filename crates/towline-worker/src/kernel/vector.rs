//! What happens to a row between the matrices: norms, rotations, gates.
//!
//! Each works on one row and is a fixed sequence of sixteen-lane operations, so it depends on nothing but the row.
//!
//! **Cost.** A layer of SmolLM2-135M does a few thousand elements of this a row, under 3 µs on one core with AVX-512:
//! noise in prefill, about 1 % of decode, where it runs on the caller alone rather than pay for a region.

use super::simd::{Half, LANES, Simd};
use super::{Kernel, Level};

/// `out = x / sqrt(mean(x²) + epsilon) · weight`, over a row (Zhang and Sennrich 2019).
///
/// All three have the same length; a tail beyond the last whole sixteen is padded with zeros.
pub fn rms_norm(level: Level, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    level.run(RmsNorm { x, weight, epsilon, out });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut squares = simd.splat(0.0);
        for chunk in self.x.chunks(LANES) {
            let x = simd.load(&padded(chunk));
            squares = simd.fma(x, x, squares);
        }
        let mean = simd.sum(squares) / self.x.len() as f32;
        let scale = simd.splat(1.0 / (mean + self.epsilon).sqrt());
        for ((x, weight), out) in
            self.x.chunks(LANES).zip(self.weight.chunks(LANES)).zip(self.out.chunks_mut(LANES))
        {
            let y = simd.mul(simd.mul(simd.load(&padded(x)), scale), simd.load(&padded(weight)));
            put(simd, y, out);
        }
    }
}

/// `out = silu(gate) · up`, silu(x) = x / (1 + e^-x): the feed-forward gate (Shazeer 2020).
pub fn silu_gate(level: Level, gate: &[f32], up: &[f32], out: &mut [f32]) {
    level.run(SiluGate { gate, up, out });
}

struct SiluGate<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluGate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let one = simd.splat(1.0);
        for ((gate, up), out) in
            self.gate.chunks(LANES).zip(self.up.chunks(LANES)).zip(self.out.chunks_mut(LANES))
        {
            let gate = simd.load(&padded(gate));
            let decay = simd.exp(simd.sub(simd.splat(0.0), gate));
            let gated = simd.mul(simd.div(gate, simd.add(one, decay)), simd.load(&padded(up)));
            put(simd, gated, out);
        }
    }
}

/// Rotates neighbouring pairs of a head by the position's angles (RoPE, Su 2021, in Llama's interleaved order).
/// `angles` has a cosine and a sine for each rotated pair; dimensions beyond stay.
pub fn rotate(head: &mut [f32], angles: &[[f32; 2]]) {
    for (pair, [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
        let [x, y] = *pair;
        *pair = [x * cos - y * sin, x * sin + y * cos];
    }
}

/// Rounds `values` (a multiple of 16) to f16, little-endian, as the cache keeps them.
pub fn to_half(level: Level, values: &[f32], out: &mut [u8]) {
    level.run(ToHalf { values, out });
}

struct ToHalf<'a> {
    values: &'a [f32],
    out: &'a mut [u8],
}

impl Kernel for ToHalf<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let halves: &mut [Half] = self.out.as_chunks_mut().0;
        for (values, halves) in
            self.values.as_chunks::<LANES>().0.iter().zip(halves.as_chunks_mut::<LANES>().0)
        {
            simd.store_half(simd.load(values), halves);
        }
    }
}

#[inline(always)]
fn padded(chunk: &[f32]) -> [f32; LANES] {
    if let Some(whole) = chunk.first_chunk::<LANES>() {
        return *whole;
    }
    let mut lanes = [0.0; LANES];
    lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane = *x);
    lanes
}

#[inline(always)]
fn put<S: Simd>(simd: S, value: S::F, out: &mut [f32]) {
    if let Some(whole) = out.first_chunk_mut::<LANES>() {
        return simd.store(value, whole);
    }
    let mut lanes = [0.0; LANES];
    simd.store(value, &mut lanes);
    out.iter_mut().zip(lanes).for_each(|(out, lane)| *out = lane);
}
