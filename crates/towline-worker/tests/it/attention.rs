//! The attention kernel against the definition, and against itself under every way of cutting the work.

use towline_fabric::Memory;
use towline_worker::kernel::Level;
use towline_worker::kernel::attention::{Attention, Layer, Rows, SEGMENT_TOKENS, Scratch, Shape};
use towline_worker::kernel::team::Team;

const TOKENS: usize = 3 * SEGMENT_TOKENS / 2 + 5;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;

/// A sequence of random K, V and queries, and where its blocks lie in a memory full of NaN.
struct Case {
    dim: usize,
    block_tokens: usize,
    memory: Memory,
    blocks: Vec<u32>,
    keys: Vec<half::f16>,
    values: Vec<half::f16>,
    queries: Vec<f32>,
}

fn noise(index: usize, salt: usize) -> f32 {
    let mixed =
        (index.wrapping_mul(2_654_435_761) ^ salt.wrapping_mul(40_503)).wrapping_mul(2_246_822_519) >> 7;
    (mixed % 2003) as f32 / 1001.0 - 1.0
}

impl Case {
    fn new(dim: usize, block_tokens: usize, stride: usize) -> Self {
        let count = TOKENS.div_ceil(block_tokens);
        // Blocks in an order with nothing in common with positions; `stride` must be coprime to the pool.
        let blocks: Vec<u32> =
            (0..count).map(|index| u32::try_from((index * stride + 3) % (count + 1)).unwrap()).collect();
        assert!((0..count).all(|index| blocks.iter().filter(|block| **block == blocks[index]).count() == 1));
        let part = KV_HEADS * block_tokens * dim * 2;
        let memory = Memory::allocate("attention", (2 * part * (count + 1)) as u64).unwrap();
        memory.write_from(0, &vec![0xff; 2 * part * (count + 1)]).unwrap();
        let half = |salt| {
            (0..TOKENS * KV_HEADS * dim).map(|i| half::f16::from_f32(noise(i, salt))).collect::<Vec<_>>()
        };
        let (keys, values) = (half(1), half(2));
        for token in 0..TOKENS {
            for head in 0..KV_HEADS {
                for (part_index, data) in [&keys, &values].into_iter().enumerate() {
                    let from = (token * KV_HEADS + head) * dim;
                    let bytes: Vec<u8> =
                        data[from..from + dim].iter().flat_map(|x| x.to_le_bytes()).collect();
                    let block = blocks[token / block_tokens] as usize * 2 * part + part_index * part;
                    let at = block + (head * block_tokens + token % block_tokens) * dim * 2;
                    memory.write_from(at as u64, &bytes).unwrap();
                }
            }
        }
        let queries = (0..TOKENS * HEADS * dim).map(|i| 3.0 * noise(i, 5)).collect();
        Self { dim, block_tokens, memory, blocks, keys, values, queries }
    }

    /// Rows of positions `range`, computed in one call.
    fn run(&self, level: Level, members: usize, range: std::ops::Range<usize>) -> Vec<u32> {
        let part = (KV_HEADS * self.block_tokens * self.dim * 2) as u64;
        let shape = Shape {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: self.dim,
            query_stride: HEADS * self.dim,
            block_tokens: self.block_tokens,
        };
        let layer = Layer { memory: &self.memory, block_bytes: 2 * part, k: 0, v: part };
        let queries = &self.queries[range.start * HEADS * self.dim..];
        let rows = Rows { first_row: 0, position: range.start, count: range.len(), blocks: &self.blocks };
        let mut out = vec![f32::NAN; range.len() * HEADS * self.dim];
        let mut team = Team::new(members).unwrap();
        Attention { level, shape, layer, queries }.run(
            &mut team,
            &mut Scratch::new(members),
            &[rows],
            &mut out,
        );
        out.iter().map(|value| value.to_bits()).collect()
    }

    /// The definition, in f64.
    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let kv_head = head / (HEADS / KV_HEADS);
        let row = |data: &[half::f16], token: usize| -> Vec<f64> {
            let from = (token * KV_HEADS + kv_head) * self.dim;
            data[from..from + self.dim].iter().map(|x| x.to_f64()).collect()
        };
        let query = &self.queries[(position * HEADS + head) * self.dim..][..self.dim];
        let scores: Vec<f64> = (0..=position)
            .map(|token| {
                let dot: f64 = row(&self.keys, token).iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum();
                dot / (self.dim as f64).sqrt()
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.dim];
        for (token, weight) in weights.iter().enumerate() {
            out.iter_mut().zip(row(&self.values, token)).for_each(|(out, v)| *out += weight / total * v);
        }
        out
    }
}

#[test]
fn attention_is_the_definition() {
    for (dim, block_tokens) in [(64, 16), (16, 8), (80, 24)] {
        let case = Case::new(dim, block_tokens, 7);
        let found = case.run(Level::best(), 2, 0..TOKENS);
        for position in [0, 1, 15, 16, 17, SEGMENT_TOKENS - 1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1, TOKENS - 1]
        {
            for head in 0..HEADS {
                let from = (position * HEADS + head) * dim;
                let row = found[from..from + dim].iter().map(|bits| f64::from(f32::from_bits(*bits)));
                for (found, exact) in row.zip(case.exact(position, head)) {
                    assert!(
                        (found - exact).abs() < 2e-5,
                        "{dim}/{block_tokens} at {position}, head {head}: {found} for {exact}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_on_every_level_in_every_tile_with_every_team() {
    for (dim, block_tokens) in [(64, 16), (16, 8), (80, 24)] {
        let case = Case::new(dim, block_tokens, 7);
        let whole = case.run(Level::Scalar, 1, 0..TOKENS);
        let width = HEADS * dim;
        for level in Level::available() {
            for (start, end) in [
                (0, 1),
                (3, 12),
                (TOKENS - 1, TOKENS),
                (SEGMENT_TOKENS - 3, SEGMENT_TOKENS + 14),
                (0, TOKENS),
            ] {
                for members in 1..=3 {
                    let found = case.run(level, members, start..end);
                    assert!(
                        found == whole[start * width..end * width],
                        "{level:?}, {members} members, {start}..{end}"
                    );
                }
            }
        }
    }
}

#[test]
fn where_blocks_lie_does_not_matter() {
    let (one, other) = (Case::new(64, 16, 11), Case::new(64, 16, 7));
    assert_ne!(one.blocks, other.blocks);
    assert!(one.run(Level::best(), 2, 0..TOKENS) == other.run(Level::best(), 2, 0..TOKENS));
}
