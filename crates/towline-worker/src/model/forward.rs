//! One step: the tokens of a batch, layer by layer.
//!
//! Rows of all sequences go through the matrices together; only attention looks at sequences. Nothing here depends on
//! how many rows there are or who they belong to, except where a row's result is put.
//!
//! **Cost.** Five regions of the team a layer (QKV, attention, output, gate and up, down; a sixth when there are rows
//! enough to share norms and gates), so 150 for SmolLM2-135M's 30 layers, about 0.2 ms of a 6 ms decode step. Buffers
//! are sized at the first step of a size and kept: `step_tokens` × (2·hidden + qkv + 2·ffn …) × 4 bytes, 12 MB for
//! 512 rows.

use super::cache::{KvCache, Place};
use super::config::Config;
use super::error::ForwardError;
use super::weights::{Layer, Weights};
use super::{CACHE_ELEMENT_BYTES, Logits, Sequence};
use crate::kernel::attention::{Attention, Rows, Scratch, Shape};
use crate::kernel::matmul::{Into, Product};
use crate::kernel::matrix::Matrix;
use crate::kernel::quantize::Activations;
use crate::kernel::team::Team;
use crate::kernel::{Level, vector};

/// The team and its buffers.
pub(super) struct Engine {
    team: Team,
    level: Level,
    step_tokens: usize,
    scratch: Scratch,
    activations: Activations,
    /// The residual stream: `[row][padded hidden]`.
    stream: Vec<f32>,
    /// `[row][queries, keys, values]`.
    qkv: Vec<f32>,
    /// `[row][heads × dim]`.
    attended: Vec<f32>,
    /// `[row][gate, up]`.
    gate_up: Vec<f32>,
    /// `[row][cos and sin of each pair]`.
    angles: Vec<[f32; 2]>,
    logits: Vec<f32>,
}

/// What all layers of a step share.
struct Step<'a> {
    config: &'a Config,
    weights: &'a Weights,
    cache: &'a KvCache,
    slots: &'a [Slot],
    rows: &'a [Rows<'a>],
}

/// A row's token and where its K and V go.
#[derive(Clone, Copy)]
struct Slot {
    token: u32,
    position: usize,
    block: u32,
    offset: usize,
}

/// Checks everything that the kernels rely on.
pub(super) fn check(
    config: &Config,
    max: usize,
    cache: &KvCache,
    batch: &[Sequence<'_>],
) -> Result<(), ForwardError> {
    let part = (config.kv_width() * cache.block_tokens()) as u64 * u64::from(CACHE_ELEMENT_BYTES);
    if cache.layers() != config.layers || cache.part_bytes() != part {
        return Err(ForwardError::Layout);
    }
    let tokens = batch.iter().fold(0usize, |sum, sequence| sum.saturating_add(sequence.tokens.len()));
    if tokens > max {
        return Err(ForwardError::StepTokens { tokens, max });
    }
    let mut written = std::collections::HashSet::new();
    for (sequence, what) in batch.iter().enumerate() {
        let end = what.position.saturating_add(what.tokens.len());
        let needed = end.div_ceil(cache.block_tokens());
        if what.tokens.is_empty() {
            return Err(ForwardError::NoTokens { sequence });
        }
        if end > config.context {
            return Err(ForwardError::Context { sequence, end, context: config.context });
        }
        if needed > what.blocks.len() {
            return Err(ForwardError::BlockTable { sequence, needed, found: what.blocks.len() });
        }
        if let Some(token) = what.tokens.iter().find(|token| **token as usize >= config.vocab) {
            return Err(ForwardError::Token { sequence, token: *token, vocab: config.vocab });
        }
        if let Some(block) = what.blocks[..needed].iter().find(|block| **block >= cache.blocks()) {
            return Err(ForwardError::Block { sequence, block: *block, blocks: cache.blocks() });
        }
        let targets = &what.blocks[what.position / cache.block_tokens()..needed];
        if let Some(block) = targets.iter().find(|block| !written.insert(**block)) {
            return Err(ForwardError::SharedBlock { sequence, block: *block });
        }
    }
    Ok(())
}

impl Engine {
    pub(super) fn new(team: Team, level: Level, step_tokens: usize) -> Self {
        let scratch = Scratch::new(team.members());
        Self {
            team,
            level,
            step_tokens,
            scratch,
            activations: Activations::new(),
            stream: Vec::new(),
            qkv: Vec::new(),
            attended: Vec::new(),
            gate_up: Vec::new(),
            angles: Vec::new(),
            logits: Vec::new(),
        }
    }

    pub(super) fn step_tokens(&self) -> usize {
        self.step_tokens
    }

    /// Runs a checked batch, and calls `stored` with the number of each layer as soon as the K and V of all rows are in
    /// the cache: the layer's attention and all that follows is still to be computed then.
    pub(super) fn step(
        &mut self,
        (config, weights): (&Config, &Weights),
        cache: &KvCache,
        batch: &[Sequence<'_>],
        stored: &mut dyn FnMut(usize),
    ) -> Vec<Option<Logits>> {
        let slots = slots(cache, batch);
        if slots.is_empty() {
            return Vec::new();
        }
        let step = Step { config, weights, cache, slots: &slots, rows: &attention_rows(batch) };
        self.embed(&step);
        self.turn(&step);
        for index in 0..weights.layers.len() {
            self.keys(&step, index);
            stored(index);
            self.attention(&step, index);
            self.feed_forward(&step, &weights.layers[index]);
        }
        self.head(&step, batch)
    }

    fn embed(&mut self, step: &Step<'_>) {
        let (hidden, width) = (step.config.hidden, step.config.hidden.next_multiple_of(16));
        self.stream.resize(step.slots.len() * width, 0.0);
        self.team.chunks(&mut self.stream, width, |row, stream| {
            stream[hidden..].fill(0.0);
            step.weights.embedding.row(step.slots[row].token as usize, &mut stream[..hidden]);
        });
    }

    /// The rotation's cosines and sines for each row.
    fn turn(&mut self, step: &Step<'_>) {
        let pairs = step.config.rope_dim / 2;
        let (base, dims) = (f64::from(step.config.rope_base), step.config.rope_dim as f64);
        let factor =
            |pair: usize| step.weights.rope_factors.get(pair).map_or(1.0, |factor| f64::from(*factor));
        let frequencies: Vec<f64> =
            (0..pairs).map(|pair| base.powf(-((2 * pair) as f64) / dims) / factor(pair)).collect();
        self.angles.resize(step.slots.len() * pairs, [0.0; 2]);
        self.team.chunks(&mut self.angles, pairs, |row, angles| {
            for (angle, frequency) in angles.iter_mut().zip(&frequencies) {
                *angle = turned(step.slots[row].position as f64 * frequency);
            }
        });
    }

    /// Queries, keys and values of a layer; the latter two go to the cache. The team has joined when this returns, so
    /// all of them are stored for whoever is told.
    fn keys(&mut self, step: &Step<'_>, index: usize) {
        let (layer, count) = (&step.weights.layers[index], step.slots.len());
        self.norm(step.config, &layer.attention_norm, count);
        let stride = layer.qkv.n_padded();
        self.qkv.resize(count * stride, 0.0);
        product(self.level, &layer.qkv, &self.activations, Into::Store).run(&mut self.team, &mut self.qkv);
        self.rotate_and_keep(step, index, stride);
    }

    fn attention(&mut self, step: &Step<'_>, index: usize) {
        let (config, layer, count) = (step.config, &step.weights.layers[index], step.slots.len());
        self.attended.resize(count * config.query_width(), 0.0);
        let shape = Shape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            query_stride: layer.qkv.n_padded(),
            block_tokens: step.cache.block_tokens(),
        };
        let attention =
            Attention { level: self.level, shape, layer: step.cache.layer(index), queries: &self.qkv };
        attention.run(&mut self.team, &mut self.scratch, step.rows, &mut self.attended);
        let (width, attended) = (config.query_width(), &self.attended);
        self.activations.fill(&mut self.team, self.level, (count, width), |row, values| {
            values.copy_from_slice(&attended[row * width..(row + 1) * width]);
        });
        product(self.level, &layer.output, &self.activations, Into::Add)
            .run(&mut self.team, &mut self.stream);
    }

    /// Rotates queries and keys and writes keys and values to the cache.
    fn rotate_and_keep(&mut self, step: &Step<'_>, layer: usize, stride: usize) {
        let (config, angles, level) = (step.config, &self.angles, self.level);
        let (query, kv, pairs) = (config.query_width(), config.kv_width(), config.rope_dim / 2);
        let element = CACHE_ELEMENT_BYTES as usize;
        self.team.chunks(&mut self.qkv, stride, |row, values| {
            let angles = &angles[row * pairs..(row + 1) * pairs];
            values[..query + kv]
                .chunks_exact_mut(config.head_dim)
                .for_each(|head| vector::rotate(head, angles));
            let mut halves = vec![0; 2 * kv * element];
            vector::to_half(level, &values[query..query + 2 * kv], &mut halves);
            let (k, v) = halves.split_at(kv * element);
            let Slot { block, offset: slot, .. } = step.slots[row];
            step.cache.write(Place { layer, block, slot, head_bytes: config.head_dim * element }, k, v);
        });
    }

    fn feed_forward(&mut self, step: &Step<'_>, layer: &Layer) {
        let (config, count) = (step.config, step.slots.len());
        self.norm(config, &layer.feed_forward_norm, count);
        let (stride, wide, level) = (layer.gate_up.n_padded(), config.feed_forward, self.level);
        self.gate_up.resize(count * stride, 0.0);
        product(level, &layer.gate_up, &self.activations, Into::Store).run(&mut self.team, &mut self.gate_up);
        let gate_up = &self.gate_up;
        self.activations.fill(&mut self.team, level, (count, wide), |row, values| {
            let (gate, up) = gate_up[row * stride..row * stride + 2 * wide].split_at(wide);
            vector::silu_gate(level, gate, up, values);
        });
        product(level, &layer.down, &self.activations, Into::Add).run(&mut self.team, &mut self.stream);
    }

    /// Normalises and quantises the first `count` rows of the stream.
    fn norm(&mut self, config: &Config, weight: &[f32], count: usize) {
        let (stream, level, hidden) = (&self.stream, self.level, config.hidden);
        let width = hidden.next_multiple_of(16);
        self.activations.fill(&mut self.team, level, (count, hidden), |row, values| {
            vector::rms_norm(
                level,
                &stream[row * width..row * width + hidden],
                weight,
                config.rms_epsilon,
                values,
            );
        });
    }

    /// Logits of the wanted rows.
    fn head(&mut self, step: &Step<'_>, batch: &[Sequence<'_>]) -> Vec<Option<Logits>> {
        let (config, width) = (step.config, step.config.hidden.next_multiple_of(16));
        let (mut end, mut wanted) = (0, Vec::new());
        for sequence in batch {
            end += sequence.tokens.len();
            if sequence.want_logits {
                wanted.push(end - 1);
            }
        }
        if wanted.is_empty() {
            return batch.iter().map(|_| None).collect();
        }
        for (to, from) in wanted.iter().enumerate() {
            // `to` is never above `from`, so no row is overwritten before it has moved.
            self.stream.copy_within(from * width..(from + 1) * width, to * width);
        }
        self.norm(config, &step.weights.output_norm, wanted.len());
        let head = step.weights.head();
        self.logits.resize(wanted.len() * head.n_padded(), 0.0);
        product(self.level, head, &self.activations, Into::Store).run(&mut self.team, &mut self.logits);
        let mut rows = self.logits.chunks_exact(head.n_padded());
        let mut next = || rows.next().map(|row| Logits(row[..config.vocab].to_vec()));
        batch.iter().map(|sequence| if sequence.want_logits { next() } else { None }).collect()
    }
}

fn product<'a>(level: Level, matrix: &'a Matrix, rows: &'a Activations, into: Into) -> Product<'a> {
    Product { level, matrix, rows, into }
}

#[expect(clippy::cast_possible_truncation, reason = "the arithmetic is in f32")]
fn turned(angle: f64) -> [f32; 2] {
    [angle.cos() as f32, angle.sin() as f32]
}

fn slots(cache: &KvCache, batch: &[Sequence<'_>]) -> Vec<Slot> {
    let each = |sequence: &Sequence<'_>, index: usize, token: u32| {
        let position = sequence.position + index;
        let (block, offset) = (position / cache.block_tokens(), position % cache.block_tokens());
        Slot { token, position, block: sequence.blocks[block], offset }
    };
    let rows = |sequence| move |(index, token): (usize, &u32)| each(sequence, index, *token);
    batch.iter().flat_map(|sequence| sequence.tokens.iter().enumerate().map(rows(sequence))).collect()
}

fn attention_rows<'a>(batch: &[Sequence<'a>]) -> Vec<Rows<'a>> {
    let mut first_row = 0;
    let rows = |sequence: &Sequence<'a>| {
        let count = sequence.tokens.len();
        first_row += count;
        Rows { first_row: first_row - count, position: sequence.position, count, blocks: sequence.blocks }
    };
    batch.iter().map(rows).collect()
}
