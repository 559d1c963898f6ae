//! Activations in 8 bits, in the order the matrix kernel reads them.
//!
//! Each block of 32 values of a row gets a scale (largest magnitude / 127), 32 signed bytes and a *correction*,
//! `-128 · Σ bytes`, which undoes the weights' offset of 128 when it starts the accumulator. Rows are kept in
//! *tiles* of up to [`TILE_ROWS`]: block by block, the rows of a tile side by side, so that the kernel reads one
//! stream. Which rows share a tile changes no result: a row's numbers depend on the row alone.

use super::matrix::{BLOCK, GROUPS};
use super::simd::{LANES, Simd};
use super::team::Team;
use super::{Kernel, Level};

/// Rows of a full tile: 8 integer and 8 float accumulators leave registers for weights and scales.
pub const TILE_ROWS: usize = 8;

/// A block of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct ActivationBlock {
    /// Four signed bytes each, the lowest k in the lowest byte.
    pub(crate) quants: [i32; GROUPS],
    pub(crate) scale: f32,
    pub(crate) correction: i32,
}

/// Quantised rows; a buffer that is filled again and again.
#[derive(Debug, Default)]
pub struct Activations {
    rows: usize,
    blocks: usize,
    data: Vec<ActivationBlock>,
}

/// Where a tile's rows and data lie.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    /// `[block][row]`.
    pub(crate) data: &'a [ActivationBlock],
}

impl Activations {
    /// An empty buffer that grows to what it is given.
    pub fn new() -> Self {
        Self::default()
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Blocks a row.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Fills the buffer with `rows` rows of `k` values, which `produce(row, values)` writes (in any order, on any
    /// member).
    pub fn fill<F: Fn(usize, &mut [f32]) + Sync>(
        &mut self,
        team: &mut Team,
        level: Level,
        shape: (usize, usize),
        produce: F,
    ) {
        let (rows, k) = shape;
        (self.rows, self.blocks) = (rows, k.div_ceil(BLOCK));
        self.data.resize(rows * self.blocks, ActivationBlock::default());
        let blocks = self.blocks;
        let one = |tile: usize, data: &mut [ActivationBlock]| {
            let mut values = vec![0.0; blocks * BLOCK];
            let held = data.len() / blocks.max(1);
            for row in 0..held {
                produce(tile * TILE_ROWS + row, &mut values[..k]);
                level.run(Quantize { values: &values, row, rows: held, data });
            }
        };
        team.chunks(&mut self.data, (blocks * TILE_ROWS).max(1), one);
    }

    /// Tiles, in order of rows.
    pub(crate) fn tiles(&self) -> impl Iterator<Item = Tile<'_>> {
        self.data.chunks((self.blocks * TILE_ROWS).max(1)).enumerate().map(|(index, data)| Tile {
            first_row: index * TILE_ROWS,
            rows: data.len() / self.blocks.max(1),
            data,
        })
    }
}

/// Quantises one row into its place in a tile.
struct Quantize<'a> {
    /// Whole blocks.
    values: &'a [f32],
    row: usize,
    rows: usize,
    data: &'a mut [ActivationBlock],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let blocks = self.values.as_chunks::<BLOCK>().0;
        for (values, tile) in blocks.iter().zip(self.data.chunks_exact_mut(self.rows)) {
            tile[self.row] = block(simd, values);
        }
    }
}

#[inline(always)]
fn block<S: Simd>(simd: S, values: &[f32; BLOCK]) -> ActivationBlock {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    let halves = values.as_chunks::<LANES>().0;
    let (low, high) = (simd.load(&halves[0]), simd.load(&halves[1]));
    let zero = simd.splat(0.0);
    let size = simd.max(simd.max(low, simd.sub(zero, low)), simd.max(high, simd.sub(zero, high)));
    let largest = simd.largest(size);
    // So small a block is zero: its inverse would overflow.
    let (scale, inverse) = if largest > 1e-30 { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
    let mut bits = [[0.0; LANES]; 2];
    simd.store(simd.fma(low, simd.splat(inverse), simd.splat(ROUND)), &mut bits[0]);
    simd.store(simd.fma(high, simd.splat(inverse), simd.splat(ROUND)), &mut bits[1]);
    let mut out = ActivationBlock { scale, ..ActivationBlock::default() };
    let mut sum = 0i32;
    for (four, packed) in bits.as_flattened().chunks_exact(4).zip(&mut out.quants) {
        let mut bytes = [0; 4];
        for (byte, bits) in bytes.iter_mut().zip(four) {
            *byte = bits.to_bits().to_le_bytes()[0];
            sum += i32::from(byte.cast_signed());
        }
        *packed = i32::from_le_bytes(bytes);
    }
    out.correction = -128 * sum;
    out
}
