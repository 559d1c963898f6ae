//! Text in and out: tokens, chat prompts, streamed answers.
//!
//! Everything is read from the model file's metadata, nothing from side files, so that a model is one file and two
//! workers with the same file agree on every token.
//!
//! - [`Tokenizer`]: text to ids and ids to bytes.
//! - [`ChatTemplate`]: messages to a prompt.
//! - [`Decoder`]: ids to text as they come, never half a character.
//! - [`StopStrings`]: ends an answer at a string that may straddle tokens.

mod decode;
mod stop;
mod template;
mod tokenizer;

pub use decode::Decoder;
pub use stop::{StopStrings, Stopped};
pub use template::{ChatTemplate, TemplateError};
#[cfg(feature = "testing")]
pub(crate) use tokenizer::byte_char;
pub use tokenizer::{TokenizeError, Tokenizer, TokenizerError};
