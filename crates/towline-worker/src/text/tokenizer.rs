//! Byte-level BPE from GGUF metadata.
//!
//! Why not candle's reader: it picks the wrong pre-tokenizer for SmolLM. Which one a vocabulary was made with is
//! `tokenizer.ggml.pre`; an unknown name is refused, since a wrong split gives plausible but worse tokens. The
//! splits are those of llama.cpp (`llama-vocab.cpp`), checked against its recorded answers in `tests/it/tokenizer.rs`.
//!
//! Two encoders share the tables: with special tokens recognised (prompts from a template) and without (a user's own
//! text, which must not be able to end its turn). Bytes of tokens are kept in a table of ours, so that
//! streaming never asks the library.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value;
use thiserror::Error;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// Token types of `tokenizer.ggml.token_type`, after llama.h.
const TYPE_UNKNOWN: i64 = 2;
const TYPE_CONTROL: i64 = 3;
const TYPE_USER_DEFINED: i64 = 4;

/// Names of control tokens that end an answer, whatever the metadata's own keys say; llama.cpp knows the same.
const END_NAMES: [&str; 6] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"];

/// Llama 3's split, as llama.cpp has it for `llama-bpe`.
const LLAMA3_SPLIT: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A model's tokenizer.
pub struct Tokenizer {
    /// Recognises special tokens.
    special: tokenizers::Tokenizer,
    /// Takes them as plain text.
    plain: tokenizers::Tokenizer,
    /// Bytes of every token, end to end, and where each begins.
    bytes: Vec<u8>,
    starts: Vec<usize>,
    is_special: Vec<bool>,
    eos: Vec<u32>,
    bos: Option<u32>,
    adds_bos: bool,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab", &self.vocab())
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer that GGUF `metadata` describes, for a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// [`TokenizerError`] naming the key and what is wrong with it.
    pub fn from_metadata(metadata: &HashMap<String, Value>, vocab: usize) -> Result<Self, TokenizerError> {
        let keys = Keys(metadata);
        let kind = keys.text("tokenizer.ggml.model")?.unwrap_or("missing");
        if kind != "gpt2" {
            return Err(TokenizerError::Kind { found: kind.into() });
        }
        let split = keys.text("tokenizer.ggml.pre")?.unwrap_or("default");
        let tokens = keys.texts("tokenizer.ggml.tokens")?;
        let types = keys.integers("tokenizer.ggml.token_type")?;
        if tokens.len() != vocab || (!types.is_empty() && types.len() != vocab) {
            let what = format!("{} tokens, {} types for a vocabulary of {vocab}", tokens.len(), types.len());
            return Err(TokenizerError::Tables { what });
        }
        let kind_of = |id: usize| types.get(id).copied().unwrap_or(1);
        let bpe = model(&tokens, &keys.texts("tokenizer.ggml.merges")?, split == "llama-bpe")?;
        let mut plain = tokenizers::Tokenizer::new(bpe);
        plain.with_pre_tokenizer(Some(pre_tokenizer(split)?));
        let added = |wanted: fn(i64) -> bool, special| {
            let ids =
                tokens.iter().enumerate().filter(move |(id, text)| wanted(kind_of(*id)) && !text.is_empty());
            ids.map(|(_, text)| AddedToken::from(*text, special).normalized(false)).collect::<Vec<_>>()
        };
        plain.add_tokens(added(|kind| kind == TYPE_USER_DEFINED, false)).map_err(TokenizerError::library)?;
        let mut special = plain.clone();
        special.add_special_tokens(added(is_special, true)).map_err(TokenizerError::library)?;
        let (bytes, starts) = byte_table(&tokens, kind_of);
        let eos = end_ids(&keys, &tokens, kind_of)?;
        let is_special = (0..vocab).map(|id| is_special(kind_of(id))).collect();
        let (bos, adds_bos) = (
            keys.id("tokenizer.ggml.bos_token_id", vocab)?,
            keys.flag("tokenizer.ggml.add_bos_token", split == "llama-bpe"),
        );
        Ok(Self { special, plain, bytes, starts, is_special, eos, bos, adds_bos })
    }

    /// Text to ids. With `allow_special`, special tokens written in the text become themselves; without, they are
    /// text like any other. Adds nothing: see [`Tokenizer::bos_to_add`].
    ///
    /// # Errors
    /// [`TokenizeError`] when the split's backtracking meets its limit on hostile text.
    pub fn encode(&self, text: &str, allow_special: bool) -> Result<Vec<u32>, TokenizeError> {
        let encoder = if allow_special { &self.special } else { &self.plain };
        let encoding =
            encoder.encode_fast(text, false).map_err(|error| TokenizeError { what: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids to text at once; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary and, unless `keep_special`,
    /// special tokens give nothing.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> String {
        let kept = ids.iter().filter(|id| keep_special || !self.is_special(**id));
        let bytes: Vec<u8> = kept.flat_map(|id| self.token_bytes(*id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes a token stands for; empty outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(start), Some(end)) => &self.bytes[*start..*end],
            _ => &[],
        }
    }

    /// Tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.is_special.len()
    }

    /// Tokens that end an answer.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Whether a token ends an answer.
    pub fn is_eos(&self, id: u32) -> bool {
        self.eos.contains(&id)
    }

    /// Whether a token is a control token, never shown.
    pub fn is_special(&self, id: u32) -> bool {
        self.is_special.get(id as usize).copied().unwrap_or(false)
    }

    /// The token that begins a text, whether or not the model wants it added.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token to put before a bare prompt, if the model wants one. Chat templates write their own.
    pub fn bos_to_add(&self) -> Option<u32> {
        self.bos.filter(|_| self.adds_bos)
    }
}

fn is_special(kind: i64) -> bool {
    kind == TYPE_CONTROL || kind == TYPE_UNKNOWN
}

fn model(tokens: &[&str], merges: &[&str], ignore_merges: bool) -> Result<BPE, TokenizerError> {
    let wrong = |what: String| TokenizerError::Tables { what };
    let mut ids = Vocab::with_capacity(tokens.len());
    for (id, token) in (0..).zip(tokens) {
        if ids.insert((*token).to_owned(), id).is_some() {
            return Err(wrong(format!("token {id} appears twice: {token:?}")));
        }
    }
    let pair = |(index, merge): (usize, &&str)| {
        let parts = merge.split_once(' ').filter(|(left, right)| {
            // The library copies into a buffer sized by the longest token, so the merged token must be one.
            ids.contains_key(*left) && ids.contains_key(*right) && ids.contains_key(&format!("{left}{right}"))
        });
        let parts = parts.map(|(left, right)| (left.to_owned(), right.to_owned()));
        parts.ok_or_else(|| wrong(format!("merge {index} joins what is no token: {merge:?}")))
    };
    let merges = merges.iter().enumerate().map(pair).collect::<Result<Vec<_>, _>>()?;
    BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(TokenizerError::library)
}

/// The splits by their name in GGUF.
fn pre_tokenizer(name: &str) -> Result<PreTokenizerWrapper, TokenizerError> {
    let bytes = |split| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, split));
    match name {
        "gpt-2" | "default" => Ok(bytes(true)),
        "smollm" | "starcoder" | "refact" | "command-r" => {
            let digits = PreTokenizerWrapper::Digits(Digits::new(true));
            Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![digits, bytes(true)])))
        }
        "llama-bpe" => {
            let pattern = SplitPattern::Regex(LLAMA3_SPLIT.into());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(TokenizerError::library)?;
            Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![
                PreTokenizerWrapper::Split(split),
                bytes(false),
            ])))
        }
        other => Err(TokenizerError::Split { found: other.into() }),
    }
}

/// Bytes of all tokens: ordinary ones are written in GPT-2's alphabet, one character a byte; special ones as they are.
fn byte_table(tokens: &[&str], kind_of: impl Fn(usize) -> i64) -> (Vec<u8>, Vec<usize>) {
    let alphabet: HashMap<char, u8> = (0..=255).map(|byte| (byte_char(byte), byte)).collect();
    let (mut bytes, mut starts) = (Vec::new(), vec![0]);
    for (id, token) in tokens.iter().enumerate() {
        let verbatim = is_special(kind_of(id)) || kind_of(id) == TYPE_USER_DEFINED;
        let mapped: Option<Vec<u8>> =
            if verbatim { None } else { token.chars().map(|c| alphabet.get(&c).copied()).collect() };
        bytes.extend(mapped.as_deref().unwrap_or(token.as_bytes()));
        starts.push(bytes.len());
    }
    (bytes, starts)
}

/// GPT-2's printable stand-in for a byte (`bytes_to_unicode` in its `encoder.py`): itself where printable, else the next
/// of U+0100….
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|byte| !printable(*byte)).count();
    u32::try_from(256 + before).ok().and_then(char::from_u32).unwrap_or('\u{fffd}')
}

fn end_ids(
    keys: &Keys<'_>,
    tokens: &[&str],
    kind_of: impl Fn(usize) -> i64,
) -> Result<Vec<u32>, TokenizerError> {
    let mut ends = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(keys.id(&format!("tokenizer.ggml.{key}"), tokens.len())?);
    }
    let named = (0..)
        .zip(tokens)
        .filter(|(id, text)| kind_of(*id as usize) == TYPE_CONTROL && END_NAMES.contains(text));
    ends.extend(named.map(|(id, _): (u32, _)| id));
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

/// Typed look-ups.
struct Keys<'a>(&'a HashMap<String, Value>);

impl<'a> Keys<'a> {
    fn wrong(key: &str, value: &Value, wanted: &str) -> TokenizerError {
        TokenizerError::Tables { what: format!("`{key}` is a {:?}, not {wanted}", value.value_type()) }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, TokenizerError> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(Self::wrong(key, other, "text")),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<&'a str>, TokenizerError> {
        let items = self.items(key)?;
        let text = |item: &'a Value| {
            item.to_string().map(String::as_str).map_err(|_| Self::wrong(key, item, "a list of texts"))
        };
        items.iter().map(text).collect()
    }

    fn integers(&self, key: &str) -> Result<Vec<i64>, TokenizerError> {
        let integer = |item: &Value| match item {
            Value::I32(value) => Ok(i64::from(*value)),
            Value::U32(value) => Ok(i64::from(*value)),
            other => Err(Self::wrong(key, other, "a list of integers")),
        };
        if !self.0.contains_key(key) {
            return Ok(Vec::new());
        }
        self.items(key)?.iter().map(integer).collect()
    }

    fn items(&self, key: &str) -> Result<&'a [Value], TokenizerError> {
        match self.0.get(key) {
            Some(Value::Array(items)) => Ok(items),
            Some(other) => Err(Self::wrong(key, other, "a list")),
            None => Err(TokenizerError::Tables { what: format!("`{key}` is missing") }),
        }
    }

    fn id(&self, key: &str, vocab: usize) -> Result<Option<u32>, TokenizerError> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let id =
            value.to_u64().ok().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
        id.map(Some).ok_or_else(|| TokenizerError::Tables { what: format!("`{key}` is no token of {vocab}") })
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        match self.0.get(key) {
            Some(Value::Bool(flag)) => *flag,
            _ => default,
        }
    }
}

/// Why a model's tokenizer cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// Use a model with a byte-level BPE vocabulary.
    #[error("its kind is `{found}`; this engine has byte-level BPE (`gpt2`)")]
    Kind {
        /// `tokenizer.ggml.model`.
        found: String,
    },
    /// The split is not known here; a guess would give wrong tokens.
    #[error(
        "its split `{found}` (tokenizer.ggml.pre) is not known; known are smollm, gpt-2, default, starcoder, refact, command-r, llama-bpe"
    )]
    Split {
        /// `tokenizer.ggml.pre`.
        found: String,
    },
    /// The tables contradict each other; convert the model again.
    #[error("{what}")]
    Tables {
        /// What doesn't fit.
        what: String,
    },
    /// The tokenizer library refuses the tables.
    #[error("the tokenizers library: {what}")]
    Library {
        /// In its words.
        what: String,
    },
}

impl TokenizerError {
    fn library(error: impl std::fmt::Display) -> Self {
        Self::Library { what: error.to_string() }
    }
}

/// Text that cannot be split into tokens; the caller's to shorten.
#[derive(Clone, Debug, Error)]
#[error("the text cannot be tokenised: {what}")]
pub struct TokenizeError {
    /// In the library's words.
    what: String,
}
