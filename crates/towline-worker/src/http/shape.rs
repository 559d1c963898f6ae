//! What chat and completions share in their answers: the envelope, the usage, and one piece of generated text.
//!
//! Structs, not `json!`: the order of the fields is the order in which OpenAI's own answers have them, and a token's
//! chunk is written without building a tree.

use serde::Serialize;
use towline_wire::kv_params::RemoteKv;
use towline_wire::receipt::Receipt;

use super::{chat, completion};

/// The endpoint that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Endpoint {
    /// The word in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
        }
    }

    /// Where the prompt stands in the request.
    pub(super) fn prompt_param(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions => "prompt",
        }
    }

    /// How ids of this endpoint begin.
    pub(super) fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completions => "cmpl-",
        }
    }

    /// The chunk before the first token, if the endpoint has one.
    pub(super) fn opening(self, head: &Head, prompt: Option<&[u32]>) -> Option<Vec<u8>> {
        match self {
            Self::Chat => Some(chat::opening(head, prompt)),
            Self::Completions => None,
        }
    }

    /// A chunk with new text, or the last one of the choice with its reason.
    pub(super) fn chunk(self, head: &Head, piece: &Piece, end: Chunk<'_>) -> Vec<u8> {
        match self {
            Self::Chat => chat::chunk(head, piece, end),
            Self::Completions => completion::chunk(head, piece, end),
        }
    }

    /// The chunk that carries the usage.
    pub(super) fn usage_chunk(self, head: &Head, usage: &Usage) -> Vec<u8> {
        let object = match self {
            Self::Chat => chat::CHUNK,
            Self::Completions => completion::OBJECT,
        };
        Envelope { usage: Some(Some(usage)), ..Envelope::<()>::new(head, object, &[]) }.to_json()
    }

    /// The answer to a request that is not streamed.
    pub(super) fn whole(self, head: &Head, piece: &Piece, tail: &Tail<'_>) -> Vec<u8> {
        match self {
            Self::Chat => chat::whole(head, piece, tail),
            Self::Completions => completion::whole(head, piece, tail),
        }
    }
}

/// What every part of an answer repeats, and which optional fields its parts have.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) logprobs: bool,
    pub(super) token_ids: bool,
    /// Chunks before the last carry `"usage": null`, as OpenAI's do when usage was asked for.
    pub(super) null_usage: bool,
}

/// Generated text: one token's in a chunk, all of it in a whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) token_ids: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprob>,
    /// Characters of the answer before this piece.
    pub(super) offset: usize,
}

impl Piece {
    /// Joins the next piece.
    pub(super) fn append(&mut self, next: Self) {
        self.text.push_str(&next.text);
        self.token_ids.extend(next.token_ids);
        self.logprobs.extend(next.logprobs);
    }
}

/// A chosen token and the logarithm of its probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TokenLogprob {
    pub(super) token: String,
    pub(super) logprob: f32,
}

/// What closes a chunk.
#[derive(Clone, Copy, Default)]
pub(super) struct Chunk<'a> {
    pub(super) finish_reason: Option<&'static str>,
    /// The prompt's tokens, in the first chunk when they were asked for.
    pub(super) prompt: Option<&'a [u32]>,
}

/// What closes a whole answer.
pub(super) struct Tail<'a> {
    pub(super) finish_reason: &'static str,
    pub(super) usage: &'a Usage,
    pub(super) prompt: Option<&'a [u32]>,
    pub(super) kv: Option<&'a RemoteKv>,
}

/// The envelope of an answer or chunk.
#[derive(Serialize)]
pub(super) struct Envelope<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<&'a Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kv_transfer_params: Option<&'a RemoteKv>,
}

impl<'a, C: Serialize> Envelope<'a, C> {
    /// An envelope without usage.
    pub(super) fn new(head: &'a Head, object: &'static str, choices: &'a [C]) -> Self {
        Self {
            id: &head.id,
            object,
            created: head.created,
            model: &head.model,
            choices,
            usage: head.null_usage.then_some(None),
            prompt_token_ids: None,
            kv_transfer_params: None,
        }
    }

    /// The envelope of a whole answer.
    pub(super) fn whole(head: &'a Head, object: &'static str, choices: &'a [C], tail: &Tail<'a>) -> Self {
        Self {
            usage: Some(Some(tail.usage)),
            prompt_token_ids: tail.prompt,
            kv_transfer_params: tail.kv,
            ..Self::new(head, object, choices)
        }
    }

    /// Its bytes.
    pub(super) fn to_json(&self) -> Vec<u8> {
        // Strings and numbers only: nothing in it can fail to be written.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Tokens of a request, and where the prompt's KV came from.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
    pub(super) prompt_tokens_details: PromptTokensDetails,
    /// Towline's, when asked for: prompt tokens that this worker computed itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) towline_prompt_tokens_computed: Option<usize>,
    /// Towline's, when asked for: the KV transfer's receipt, `null` when nothing was transferred.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) towline_receipt: Option<Option<Receipt>>,
}

/// OpenAI's breakdown of the prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct PromptTokensDetails {
    /// Whose KV was there at the start: found in this worker's prefix cache, or pulled.
    pub(super) cached_tokens: usize,
}
