//! Answers of `/v1/chat/completions`: a message, or deltas of one.

use serde::Serialize;

use super::shape::{Chunk, Envelope, Head, Piece, Tail, TokenLogprob};

/// The object of a chunk.
pub(super) const CHUNK: &str = "chat.completion.chunk";
const OBJECT: &str = "chat.completion";

#[derive(Serialize)]
struct DeltaChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: (),
}

#[derive(Serialize)]
struct Logprobs<'a> {
    content: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
    top_logprobs: [(); 0],
}

fn logprobs<'a>(head: &Head, tokens: &'a [TokenLogprob]) -> Option<Logprobs<'a>> {
    let entry = |entry: &'a TokenLogprob| Entry {
        token: &entry.token,
        logprob: entry.logprob,
        bytes: entry.token.as_bytes(),
        top_logprobs: [],
    };
    head.logprobs.then(|| Logprobs { content: tokens.iter().map(entry).collect() })
}

/// The chunk that names the role, before any text.
pub(super) fn opening(head: &Head, prompt: Option<&[u32]>) -> Vec<u8> {
    let choice = DeltaChoice {
        index: 0,
        delta: Delta { role: Some("assistant"), content: Some("") },
        logprobs: None,
        finish_reason: None,
        token_ids: None,
    };
    Envelope { prompt_token_ids: prompt, ..Envelope::new(head, CHUNK, &[choice]) }.to_json()
}

/// A chunk of text, or the last one of the choice.
pub(super) fn chunk(head: &Head, piece: &Piece, end: Chunk<'_>) -> Vec<u8> {
    let says = !piece.text.is_empty() || end.finish_reason.is_none();
    let choice = DeltaChoice {
        index: 0,
        delta: Delta { role: None, content: says.then_some(&piece.text) },
        logprobs: logprobs(head, &piece.logprobs).filter(|logprobs| !logprobs.content.is_empty()),
        finish_reason: end.finish_reason,
        token_ids: head.token_ids.then_some(&piece.token_ids),
    };
    Envelope { prompt_token_ids: end.prompt, ..Envelope::new(head, CHUNK, &[choice]) }.to_json()
}

/// The whole answer.
pub(super) fn whole(head: &Head, piece: &Piece, tail: &Tail<'_>) -> Vec<u8> {
    let choice = Choice {
        index: 0,
        message: Message { role: "assistant", content: &piece.text, refusal: () },
        logprobs: logprobs(head, &piece.logprobs),
        finish_reason: tail.finish_reason,
        token_ids: head.token_ids.then_some(&piece.token_ids),
    };
    Envelope::whole(head, OBJECT, &[choice], tail).to_json()
}
