//! Llama-family models: loaded from GGUF, run over a paged cache.
//!
//! **What it promises.** [`Model::forward`] takes any mix of prompts, pieces of prompts and single tokens of any
//! number of sequences; each token's result is bitwise what it would be alone. So a prompt prefilled elsewhere and
//! pulled over a wire continues exactly as if it had been computed here, provided both ends have the same
//! [`Fingerprint`].
//!
//! **Words.** *Step*: one call of `forward`. *Row*: one token in it. *Block table*: the cache blocks of a sequence, in
//! order of position.

mod cache;
mod config;
mod error;
mod fingerprint;
mod forward;
mod gguf;
mod weights;

use std::path::Path;
use std::sync::Arc;

use towline_wire::layout::{Gqa, KvLayout};

pub use cache::{CacheError, KvCache};
pub use config::Config;
pub use error::{ForwardError, LoadError};
pub use fingerprint::Fingerprint;

use crate::kernel::Level;
use crate::kernel::team::Team;
use crate::text::{ChatTemplate, Tokenizer};

/// Most tokens of a step unless told otherwise: enough rows to be compute-bound, few enough to keep steps short.
pub const STEP_TOKENS_DEFAULT: usize = 512;
/// Most tokens of a step that can be asked for; bounds the scratch buffers.
pub const STEP_TOKENS_MAX: usize = 8192;
/// Bytes of an element of the cache: f16.
const CACHE_ELEMENT_BYTES: u32 = 2;

/// How to load a model.
#[derive(Clone, Copy)]
pub struct LoadOptions<'a> {
    /// Members of the compute team, 1 to 256.
    pub threads: usize,
    /// Most tokens a step may have, all sequences together, 1 to [`STEP_TOKENS_MAX`].
    pub step_tokens: usize,
    /// Instructions to use; the best this machine has unless given.
    pub level: Option<Level>,
    /// Told after each tensor.
    pub progress: Option<&'a dyn Fn(Progress<'_>)>,
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads, step_tokens: STEP_TOKENS_DEFAULT, level: None, progress: None }
    }
}

/// How far a load has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Tensors done.
    pub done: usize,
    /// Tensors in all.
    pub total: usize,
    /// The one just done.
    pub tensor: &'a str,
}

/// Tokens of one sequence to run in a step.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Consecutive tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`; the cache already holds those before it.
    pub position: usize,
    /// Block table covering `position + tokens.len()` tokens.
    pub blocks: &'a [u32],
    /// Whether the last token's logits are needed.
    pub want_logits: bool,
}

/// Scores of the next token: one for each token of the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits(pub Vec<f32>);

/// A loaded model with its compute team and scratch buffers.
pub struct Model {
    config: Config,
    weights: weights::Weights,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    fingerprint: Fingerprint,
    engine: forward::Engine,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Model {
    /// Reads a GGUF file, requantises its matrices to Q8_0 and packs them for the kernels.
    ///
    /// # Errors
    /// [`LoadError`] saying what is wrong with the file, where, and what to do. Untrusted files are expected: none makes
    /// it panic or allocate beyond the file's own size by more than a small factor.
    pub fn load(path: &Path, options: &LoadOptions<'_>) -> Result<Self, LoadError> {
        let mut file = gguf::File::open(path)?;
        let config = Config::read(&file)?;
        let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata(), config.vocab)?);
        let template = ChatTemplate::from_metadata(file.metadata(), &tokenizer)?;
        let team = Team::new(options.threads).map_err(|source| LoadError::Threads { source })?;
        let level = options.level.unwrap_or_else(Level::best);
        let (weights, hash) = weights::Weights::read(&mut file, &config, options.progress)?;
        let fingerprint = Fingerprint::new(&config, &weights, &hash);
        let engine = forward::Engine::new(team, level, options.step_tokens.clamp(1, STEP_TOKENS_MAX));
        Ok(Self { config, weights, tokenizer, template, fingerprint, engine })
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How its cache blocks lie, for blocks of `block_tokens`.
    pub fn layout(&self, block_tokens: u32) -> KvLayout {
        let narrow = |number: usize| u32::try_from(number).unwrap_or(u32::MAX); // bounded when the file was read
        KvLayout::gqa(Gqa {
            layers: narrow(self.config.layers),
            kv_heads: narrow(self.config.kv_heads),
            head_dim: narrow(self.config.head_dim),
            element_bytes: CACHE_ELEMENT_BYTES,
            block_tokens,
        })
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Its chat template, if the file has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// What two workers must share before one may use the other's cache.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint.clone()
    }

    /// Most tokens a step may have.
    pub fn step_tokens(&self) -> usize {
        self.engine.step_tokens()
    }

    /// Bytes of weights that one decode step reads.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// Runs the tokens of `batch`, writes their K and V into `cache`, and returns the logits that were asked for, in
    /// the order of `batch`.
    ///
    /// The caller keeps blocks apart: while this runs, nothing else writes the blocks of these tables.
    ///
    /// # Errors
    /// [`ForwardError`] naming the sequence and the bound it breaks; nothing has been computed or written then.
    pub fn forward(
        &mut self,
        cache: &KvCache,
        batch: &[Sequence<'_>],
    ) -> Result<Vec<Option<Logits>>, ForwardError> {
        self.forward_by_layer(cache, batch, &mut |_| ())
    }

    /// As [`Model::forward`], and calls `stored` with each layer's number, from 0, as soon as the layer's K and V of all
    /// tokens of the batch are in `cache`, before what depends on them is computed. The result is the same.
    ///
    /// # Errors
    /// As [`Model::forward`]; `stored` was not called then.
    pub fn forward_by_layer(
        &mut self,
        cache: &KvCache,
        batch: &[Sequence<'_>],
        stored: &mut dyn FnMut(usize),
    ) -> Result<Vec<Option<Logits>>, ForwardError> {
        forward::check(&self.config, self.engine.step_tokens(), cache, batch)?;
        Ok(self.engine.step((&self.config, &self.weights), cache, batch, stored))
    }
}
