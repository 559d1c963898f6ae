//! Answers of `/v1/completions`: text, or pieces of it, under one object name.

use serde::Serialize;

use super::shape::{Chunk, Envelope, Head, Piece, Tail};

/// The object of an answer and of a chunk.
pub(super) const OBJECT: &str = "text_completion";

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Logprobs<'a> {
    text_offset: Vec<usize>,
    token_logprobs: Vec<f32>,
    tokens: Vec<&'a str>,
    top_logprobs: (),
}

impl<'a> Choice<'a> {
    fn new(head: &Head, piece: &'a Piece, finish_reason: Option<&'static str>) -> Self {
        Self {
            index: 0,
            text: &piece.text,
            logprobs: head.logprobs.then(|| Logprobs::new(piece)),
            finish_reason,
            token_ids: head.token_ids.then_some(&piece.token_ids),
        }
    }
}

impl<'a> Logprobs<'a> {
    fn new(piece: &'a Piece) -> Self {
        let mut offset = piece.offset;
        let starts = piece.logprobs.iter().map(|entry| {
            let start = offset;
            offset += entry.token.chars().count();
            start
        });
        Self {
            text_offset: starts.collect(),
            token_logprobs: piece.logprobs.iter().map(|entry| entry.logprob).collect(),
            tokens: piece.logprobs.iter().map(|entry| entry.token.as_str()).collect(),
            top_logprobs: (),
        }
    }
}

/// A chunk of text, or the last one of the choice.
pub(super) fn chunk(head: &Head, piece: &Piece, end: Chunk<'_>) -> Vec<u8> {
    let choice = Choice::new(head, piece, end.finish_reason);
    Envelope { prompt_token_ids: end.prompt, ..Envelope::new(head, OBJECT, &[choice]) }.to_json()
}

/// The whole answer.
pub(super) fn whole(head: &Head, piece: &Piece, tail: &Tail<'_>) -> Vec<u8> {
    let choice = Choice::new(head, piece, Some(tail.finish_reason));
    Envelope::whole(head, OBJECT, &[choice], tail).to_json()
}
