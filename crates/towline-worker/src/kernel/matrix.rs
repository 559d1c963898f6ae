//! Weights in the order the matrix kernel reads them.
//!
//! Why not GGUF's Q8_0 as it lies: there a block of 32 weights belongs to one output, so a dot product ends in a sum
//! across lanes. Here 16 outputs (a *panel*) advance together, one a lane, and nothing is summed across lanes.
//!
//! Layout: for each panel of 16 columns, for each block of 32 along k: 8 groups of 64 bytes (16 columns × 4 k), each
//! weight stored as `w + 128` because the instruction wants its first operand unsigned; and 16 scales in f16. 1.0625
//! bytes a weight, as Q8_0. Columns beyond n and k beyond the matrix are zero weights.

use super::arena::{Arena, Piece};
use super::simd::LANES;

/// Weights that share a scale.
pub const BLOCK: usize = 32;
/// Groups of four along k in a block.
pub(crate) const GROUPS: usize = BLOCK / 4;
/// Zero, as stored.
const ZERO: u8 = 128;

/// One block of a panel: 8 groups of `[column × 4 + k]`.
pub(crate) type PanelBlock = [u8; GROUPS * 4 * LANES];
/// A block's scales, a half float a column.
pub(crate) type PanelScales = [u8; 2 * LANES];

/// An `n × k` matrix (n outputs), quantised to Q8_0 and packed in panels.
#[derive(Debug)]
pub struct Matrix {
    n: usize,
    k: usize,
    blocks: usize,
    quants: Piece<{ GROUPS * 4 * LANES }>,
    scales: Piece<{ 2 * LANES }>,
}

/// One row of weights in Q8_0: what [`Matrix::set_row`] packs and the fingerprint hashes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Q8Row {
    /// Signed weights, padded with zeros to whole blocks.
    pub quants: Vec<i8>,
    /// A scale a block: bits of an f16.
    pub scales: Vec<u16>,
}

impl Q8Row {
    /// Quantises `values` as GGML's Q8_0 does: scale = largest magnitude / 127, kept in f16. Weights that aren't
    /// finite become zeros.
    pub fn quantize(values: &[f32]) -> Self {
        let mut row = Self::default();
        for block in values.chunks(BLOCK) {
            let finite = block.iter().map(|x| x.abs()).filter(|x| x.is_finite());
            let scale = half::f16::from_f32((finite.fold(0.0, f32::max) / 127.0).min(65504.0));
            let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
            row.scales.push(scale.to_bits());
            row.quants.extend(block.iter().map(|x| quantum(x * inverse)));
            row.quants.resize(row.scales.len() * BLOCK, 0);
        }
        row
    }

    /// The values the quantised weights stand for.
    pub fn values(&self) -> impl Iterator<Item = f32> + '_ {
        let blocks = self.quants.chunks(BLOCK).zip(&self.scales);
        blocks.flat_map(|(quants, scale)| {
            let scale = half::f16::from_bits(*scale).to_f32();
            quants.iter().map(move |quant| f32::from(*quant) * scale)
        })
    }
}

#[expect(clippy::cast_possible_truncation, reason = "clamped to what an i8 holds; NaN becomes 0")]
fn quantum(x: f32) -> i8 {
    x.round_ties_even().clamp(-127.0, 127.0) as i8
}

impl Matrix {
    /// A matrix of zeros with `n` outputs and `k` inputs, in `arena`'s memory.
    pub fn zeros(arena: &mut Arena, n: usize, k: usize) -> Self {
        let blocks = k.div_ceil(BLOCK);
        let count = n.div_ceil(LANES) * blocks;
        let (mut quants, scales) = (arena.zeroed(count), arena.zeroed(count));
        quants.as_flattened_mut().fill(ZERO);
        Self { n, k, blocks, quants, scales }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Blocks along k.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Panels: outputs are written in sixteens, so a row of output has `16 * panels` elements.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(LANES)
    }

    /// Elements of a row of output, padding included.
    pub fn n_padded(&self) -> usize {
        self.panels() * LANES
    }

    /// Bytes that one pass over the weights reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.quants) + size_of_val(&*self.scales)
    }

    /// Puts `row` in place as output `column`. Outside the matrix nothing happens.
    pub fn set_row(&mut self, column: usize, row: &Q8Row) {
        if column >= self.n {
            return;
        }
        let (first, lane) = (column / LANES * self.blocks, column % LANES);
        let blocks = row.quants.chunks_exact(BLOCK).zip(&row.scales).take(self.blocks);
        for (index, (quants, scale)) in blocks.enumerate() {
            self.scales[first + index].as_chunks_mut().0[lane] = scale.to_le_bytes();
            for (group, four) in
                self.quants[first + index].chunks_exact_mut(4 * LANES).zip(quants.chunks_exact(4))
            {
                for (to, from) in group[4 * lane..].iter_mut().zip(four) {
                    *to = from.cast_unsigned() ^ ZERO; // two's complement + 128
                }
            }
        }
    }

    /// Reads output `column`'s weights back as f32: an embedding's row. `into` has k elements.
    pub fn row(&self, column: usize, into: &mut [f32]) {
        let (first, lane) = (column / LANES * self.blocks, column % LANES);
        for (index, values) in into.chunks_mut(BLOCK).enumerate().take(self.blocks) {
            let scale = half::f16::from_le_bytes(self.scales[first + index].as_chunks().0[lane]).to_f32();
            let groups = self.quants[first + index].chunks_exact(4 * LANES);
            for (group, values) in groups.zip(values.chunks_mut(4)) {
                for (value, weight) in values.iter_mut().zip(&group[4 * lane..]) {
                    *value = f32::from((weight ^ ZERO).cast_signed()) * scale;
                }
            }
        }
    }

    /// The blocks of one panel and their scales.
    #[inline(always)]
    pub(crate) fn panel(&self, panel: usize) -> (&[PanelBlock], &[PanelScales]) {
        let range = panel * self.blocks..(panel + 1) * self.blocks;
        (&self.quants[range.clone()], &self.scales[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_read_back_as_quantised() {
        let mut matrix = Matrix::zeros(&mut Arena::default(), 19, 40);
        let rows: Vec<Q8Row> = (0..19)
            .map(|n| {
                Q8Row::quantize(&(0..40).map(|k| ((n * 37 + k * 11) % 23) as f32 - 11.0).collect::<Vec<_>>())
            })
            .collect();
        rows.iter().enumerate().for_each(|(column, row)| matrix.set_row(column, row));
        for (column, row) in rows.iter().enumerate() {
            let mut back = vec![0.0; 40];
            matrix.row(column, &mut back);
            assert_eq!(back, row.values().take(40).collect::<Vec<_>>());
        }
    }

    #[test]
    fn quantising_again_changes_nothing() {
        let values: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin() * 0.03).collect();
        let once = Q8Row::quantize(&values);
        assert_eq!(Q8Row::quantize(&once.values().collect::<Vec<_>>()), once);
    }

    #[test]
    fn weights_that_are_not_finite_become_numbers() {
        let row = Q8Row::quantize(&[f32::NAN, f32::INFINITY, 1.0, -2.0]);
        assert!(row.values().all(f32::is_finite));
    }
}
