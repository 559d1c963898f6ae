//! Quantised matrix products: where nearly all of a forward pass's time goes.
//!
//! `out[row][column] = Σ_blocks (Σ_32 quant_a · quant_w) · (scale_a · scale_w)`, blocks in ascending order, integers
//! exact, one fused multiply-add a block. Sixteen columns advance together (a panel), up to eight rows share each
//! load of weights (a tile); neither changes an element's arithmetic.
//!
//! **Cost (AVX-512 VNNI).** A block of 16 columns × 32 k and R rows: 8 weight loads, 8·R broadcasts folded into 8·R
//! `vpdpbusd` of 64 multiply-adds, and R·(convert + multiply + FMA). At two such instructions a cycle a full tile
//! makes about 90 multiply-adds a cycle a core: SmolLM2-135M has 106 M weights a token without the head, so 2 cores at
//! 2.6 GHz could prefill some 4,000 tokens/s; memory and the rest of the pass take their share. One row (decode) reads
//! 1.0625 bytes a weight, 143 MB a token with the head: 20 GB/s give 140 tokens/s.
//!
//! **Measured** (2026-11-29, 2-core Sapphire Rapids VM, SmolLM2-135M, `cargo bench -p towline-worker --bench engine`
//! under `chrt -r 10` because the machine was shared): prefill 2138 tokens/s at 128 and 1741 at 512, decode 168
//! tokens/s at a context of 128, which is 24 GB/s of weights.
#![expect(unsafe_code, reason = "members write disjoint columns of one output")]

use std::ops::Range;

use super::matrix::{Matrix, PanelBlock, PanelScales};
use super::quantize::{ActivationBlock, Activations, TILE_ROWS, Tile};
use super::shared::{Pieces, share};
use super::simd::{LANES, Simd};
use super::team::Team;
use super::{Kernel, Level};

/// What to do with the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// `out = product`.
    Store,
    /// `out = out + product`: the residual stream.
    Add,
}

/// The operands of a product.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Instructions to use.
    pub level: Level,
    /// Weights.
    pub matrix: &'a Matrix,
    /// Inputs.
    pub rows: &'a Activations,
    /// What to do with the products.
    pub into: Into,
}

impl Product<'_> {
    /// Multiplies every row with the matrix: `out` is `[rows][matrix.n_padded()]`.
    ///
    /// # Panics
    /// If `out` is too short or the rows have another number of blocks than the matrix: shapes are fixed when a model
    /// loads.
    pub fn run(&self, team: &mut Team, out: &mut [f32]) {
        let Self { level, matrix, rows, into } = *self;
        assert_eq!(rows.blocks(), matrix.blocks(), "activations and weights differ in k");
        assert!(out.len() >= rows.rows() * matrix.n_padded(), "the output has too few rows");
        let out = Pieces::new(out);
        team.run(|member, members| {
            let panels = share(matrix.panels(), member, members);
            level.run(Share { matrix, rows, panels, out: &out, into });
        });
    }
}

/// A member's panels, for all rows.
struct Share<'a> {
    matrix: &'a Matrix,
    rows: &'a Activations,
    panels: Range<usize>,
    out: &'a Pieces<'a, f32>,
    into: Into,
}

impl Kernel for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        const { assert!(TILE_ROWS == 8) };
        let stride = self.matrix.n_padded();
        for panel in self.panels {
            let (weights, scales) = self.matrix.panel(panel);
            for tile in self.rows.tiles() {
                let start = tile.first_row * stride + panel * LANES;
                let one = PanelTile { weights, scales, tile, out: self.out, start, stride, into: self.into };
                match tile.rows {
                    1 => one.rows::<S, 1>(simd),
                    2 => one.rows::<S, 2>(simd),
                    3 => one.rows::<S, 3>(simd),
                    4 => one.rows::<S, 4>(simd),
                    5 => one.rows::<S, 5>(simd),
                    6 => one.rows::<S, 6>(simd),
                    7 => one.rows::<S, 7>(simd),
                    _ => one.rows::<S, 8>(simd),
                }
            }
        }
    }
}

/// One panel, one tile: 16 elements of each row, `stride` apart from `start` on.
struct PanelTile<'a> {
    weights: &'a [PanelBlock],
    scales: &'a [PanelScales],
    tile: Tile<'a>,
    out: &'a Pieces<'a, f32>,
    start: usize,
    stride: usize,
    into: Into,
}

impl PanelTile<'_> {
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(self, simd: S) {
        let mut sums = [simd.splat(0.0); R];
        let blocks: &[[ActivationBlock; R]] = self.tile.data.as_chunks::<R>().0;
        for ((weights, scales), blocks) in self.weights.iter().zip(self.scales).zip(blocks) {
            let mut integers = [simd.splat_i32(0); R];
            for (integer, block) in integers.iter_mut().zip(blocks) {
                *integer = simd.splat_i32(block.correction);
            }
            for (group, weights) in weights.as_chunks().0.iter().enumerate() {
                let weights = simd.weights(weights);
                for (integer, block) in integers.iter_mut().zip(blocks) {
                    *integer = simd.dot(*integer, weights, simd.activations(block.quants[group]));
                }
            }
            let Some(scales) = scales.as_chunks().0.first_chunk() else { return };
            let scales = simd.load_half(scales);
            for ((sum, integer), block) in sums.iter_mut().zip(integers).zip(blocks) {
                let scale = simd.mul(scales, simd.splat(block.scale));
                *sum = simd.fma(simd.to_f32(integer), scale, *sum);
            }
        }
        for (row, sum) in sums.into_iter().enumerate() {
            let start = self.start + row * self.stride;
            // SAFETY: sixteen columns of one row; no other member has this panel, no other tile this row.
            let piece = unsafe { self.out.piece(start..start + LANES) };
            let Some(piece) = piece.first_chunk_mut::<LANES>() else { return };
            let sum = if self.into == Into::Add { simd.add(simd.load(piece), sum) } else { sum };
            simd.store(sum, piece);
        }
    }
}
