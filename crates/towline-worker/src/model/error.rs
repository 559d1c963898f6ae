//! What can be wrong with a model file or a batch.
//!
//! Kept together because callers match on them together: a load error is the operator's to fix (another file, another
//! export), a forward error is the scheduler's.

use std::path::PathBuf;

use thiserror::Error;

use crate::text::{TemplateError, TokenizerError};

/// Why a model cannot be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Check the path and its permissions.
    #[error("cannot read {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Give a GGUF file, version 2 or 3; convert others with llama.cpp's `convert_hf_to_gguf.py`.
    #[error("{} is not a GGUF file this engine reads: {what}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What was found instead.
        what: String,
    },
    /// The file is cut short or damaged; download it again and compare its checksum.
    #[error("{} is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What doesn't add up, and where.
        what: String,
    },
    /// Use a Llama-family model.
    #[error("the model's architecture is `{found}`; this engine runs `llama`")]
    Architecture {
        /// `general.architecture`.
        found: String,
    },
    /// The export lacks a key; convert the model again with a current converter.
    #[error("metadata key `{key}` is missing; convert the model again with a current llama.cpp")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A number in the metadata is of the wrong kind, or outside what any model has.
    #[error("metadata key `{key}`: {what}")]
    Key {
        /// The key.
        key: String,
        /// What is wrong with it.
        what: String,
    },
    /// The model uses a feature that this engine lacks; running it anyway would give wrong text.
    #[error("the model needs {what}, which this engine does not have")]
    Unsupported {
        /// The feature.
        what: String,
    },
    /// The export lacks a tensor; download or convert the model again.
    #[error("tensor `{name}` is missing")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// The tensor doesn't fit the metadata; download or convert the model again.
    #[error("tensor `{name}` has shape {found:?}, the metadata says {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Outputs × inputs by the metadata.
        expected: Vec<usize>,
        /// Outputs × inputs found.
        found: Vec<usize>,
    },
    /// The tensor's data cannot be read.
    #[error("tensor `{name}`: {what}")]
    Tensor {
        /// The tensor.
        name: String,
        /// Why not.
        what: String,
    },
    /// The tokenizer's tables cannot be used.
    #[error("the model's tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// The chat template is no valid template.
    #[error("the model's chat template: {0}")]
    Template(#[from] TemplateError),
    /// Start fewer threads, or raise the limit on them.
    #[error("cannot start the compute threads: {source}")]
    Threads {
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Why a batch cannot be run. The scheduler's mistake; nothing was computed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardError {
    /// Split the batch.
    #[error("the step has {tokens} tokens, the model was loaded for {max}")]
    StepTokens {
        /// Tokens in the batch.
        tokens: usize,
        /// Most allowed.
        max: usize,
    },
    /// Leave sequences without tokens out.
    #[error("sequence {sequence} of the step has no tokens")]
    NoTokens {
        /// Index in the batch.
        sequence: usize,
    },
    /// Not a token of this model.
    #[error("sequence {sequence} of the step: token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// Index in the batch.
        sequence: usize,
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
    /// End the sequence.
    #[error("sequence {sequence} of the step reaches {end} tokens, the context has {context}")]
    Context {
        /// Index in the batch.
        sequence: usize,
        /// Tokens after this step.
        end: usize,
        /// Most tokens the model takes.
        context: usize,
    },
    /// Allocate blocks before the step.
    #[error("sequence {sequence} of the step needs {needed} blocks, its table has {found}")]
    BlockTable {
        /// Index in the batch.
        sequence: usize,
        /// Blocks its tokens need.
        needed: usize,
        /// Blocks in its table.
        found: usize,
    },
    /// A table names a block the cache does not have.
    #[error("sequence {sequence} of the step names block {block}, the cache has {blocks}")]
    Block {
        /// Index in the batch.
        sequence: usize,
        /// The block.
        block: u32,
        /// Blocks of the cache.
        blocks: u32,
    },
    /// Two places of the step would write one block: copy it first.
    #[error("sequence {sequence} of the step writes block {block}, which is written elsewhere in the step")]
    SharedBlock {
        /// Index in the batch.
        sequence: usize,
        /// The block.
        block: u32,
    },
    /// The cache was made for another model.
    #[error("the cache's layout is not this model's")]
    Layout,
}
