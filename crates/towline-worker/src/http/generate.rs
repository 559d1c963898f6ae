//! A request from its body to its answer: read, open the KV, submit, and then whole or streamed.
//!
//! Everything that can fail before the first token fails with a proper status: headers are sent only once the first
//! event is there. What holds the request (job, pulled blocks, place among those under way) is owned by the future or
//! stream that the connection polls, so a client that leaves drops all of it.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt;
use towline_wire::kv_params::RemoteKv;
use towline_wire::receipt::Receipt;

use super::admission::{Admission, REQUEST_ID, random, request_id};
use super::body;
use super::error::ApiError;
use super::front::{Events, Front, unix_now};
use super::kv::{self, KvAsk};
use super::request::{self, Ask};
use super::shape::{Endpoint, Head, Piece, PromptTokensDetails, Tail, TokenLogprob, Usage};
use super::stream;
use crate::engine::{Event, FinishReason, Finished, Job};
use crate::sample::SamplingParams;

/// The header that asks for the KV transfer's receipt in `usage`.
const RECEIPT: &str = "x-towline-receipt";
/// Bodies up to this are read where they arrive; longer ones, whose tokenising takes longer than a millisecond, on a
/// thread that may block.
const INLINE_BODY_BYTES: usize = 8 << 10;

/// Answers a request to `endpoint`.
pub(super) async fn answer(front: Arc<Front>, endpoint: Endpoint, request: Request) -> Response {
    let id = request_id(request.headers());
    let mut response = match Admission::take(&front, endpoint) {
        Ok(admission) => Box::pin(answer_admitted(front, admission, endpoint, &id, request)).await,
        Err(refusal) => refusal.into_response(),
    };
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

async fn answer_admitted(
    front: Arc<Front>,
    mut admission: Admission,
    endpoint: Endpoint,
    id: &str,
    request: Request,
) -> Response {
    let started = Generation::start(&front, endpoint, id, request).await;
    let answered = match started {
        Ok(generation) => {
            admission.first_token();
            if generation.streamed {
                return stream::response(generation, admission);
            }
            generation.whole(&front).await
        }
        Err(error) => Err(error),
    };
    match answered {
        Ok(json) => {
            admission.succeed();
            ([(header::CONTENT_TYPE, "application/json")], json).into_response()
        }
        Err(error) => {
            admission.fail(&error);
            error.into_response()
        }
    }
}

/// A request whose first event is there.
pub(super) struct Generation {
    pub(super) endpoint: Endpoint,
    pub(super) head: Head,
    pub(super) include_usage: bool,
    streamed: bool,
    first: VecDeque<Event>,
    events: Events,
    keeps: bool,
    /// Kept when the answer repeats it or a grant names it.
    prompt: Option<Vec<u32>>,
    prompt_in_answer: bool,
    wants_receipt: bool,
    receipt: Option<Receipt>,
    /// The id under which KV is lent.
    job_id: String,
    front: Arc<Front>,
    offset: usize,
}

impl Generation {
    async fn start(
        front: &Arc<Front>,
        endpoint: Endpoint,
        id: &str,
        request: Request,
    ) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let body = body::read(front.limits(), &parts.headers, body).await?;
        let ask = read_ask(front, endpoint, body).await?;
        let opening = kv::open(front, &ask, id).await?;
        let keeps = ask.kv == KvAsk::Keep;
        let name = format!("{}{id}", endpoint.id_prefix());
        // Clients may repeat their ids; jobs and leases never do.
        let job_id = format!("{name}-{:08x}", random() >> 32);
        let wants_receipt = parts.headers.get(RECEIPT).is_some_and(|value| value == "1" || value == "true");
        let mut generation = Self {
            endpoint,
            head: head(front, &ask, name, wants_receipt),
            include_usage: ask.include_usage || wants_receipt,
            streamed: ask.stream,
            first: VecDeque::new(),
            events: futures_util::stream::empty().boxed(),
            keeps,
            prompt: (keeps || ask.return_token_ids).then(|| ask.prompt.clone()),
            prompt_in_answer: ask.return_token_ids,
            wants_receipt,
            receipt: opening.receipt,
            job_id: job_id.clone(),
            front: Arc::clone(front),
            offset: 0,
        };
        generation.events = front.engine().submit(job(ask, job_id, opening.start))?;
        match generation.next().await {
            Some(Event::Failed(error)) => Err(error.into()),
            first => {
                generation.first.extend(first);
                Ok(generation)
            }
        }
    }

    /// The next event, the first one included.
    pub(super) async fn next(&mut self) -> Option<Event> {
        match self.first.pop_front() {
            Some(event) => Some(event),
            None => self.events.next().await,
        }
    }

    /// The prompt's tokens, if the answer shall repeat them.
    pub(super) fn prompt(&self) -> Option<&[u32]> {
        self.prompt.as_deref().filter(|_| self.prompt_in_answer)
    }

    /// One token as a piece of the answer.
    pub(super) fn piece(&mut self, id: u32, text: String, logprob: Option<f32>) -> Piece {
        let logprobs = match logprob {
            Some(logprob) if self.head.logprobs => {
                vec![TokenLogprob { token: self.front.text().token(id), logprob }]
            }
            _ => Vec::new(),
        };
        let offset = self.offset;
        self.offset += logprobs.iter().map(|entry| entry.token.chars().count()).sum::<usize>();
        Piece { text, token_ids: vec![id], logprobs, offset }
    }

    /// The usage of a finished answer.
    pub(super) fn usage(&mut self, finished: &Finished) -> Usage {
        Usage {
            prompt_tokens: finished.prompt_tokens,
            completion_tokens: finished.completion_tokens,
            total_tokens: finished.prompt_tokens + finished.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: finished.cached_prompt_tokens },
            towline_prompt_tokens_computed: self.wants_receipt.then_some(finished.computed_prompt_tokens),
            towline_receipt: self.wants_receipt.then(|| self.receipt.take()),
        }
    }

    /// Collects the answer.
    async fn whole(mut self, front: &Front) -> Result<Vec<u8>, ApiError> {
        let mut answer = Piece::default();
        while let Some(event) = self.next().await {
            match event {
                Event::Token { id, text, logprob } => answer.append(self.piece(id, text, logprob)),
                Event::Failed(error) => return Err(error.into()),
                Event::Finished(mut finished) => {
                    let kv = self.lend(front, &mut finished)?;
                    let usage = self.usage(&finished);
                    let finish_reason = finish_reason(finished.reason);
                    let tail = Tail { finish_reason, usage: &usage, prompt: self.prompt(), kv: kv.as_ref() };
                    return Ok(self.endpoint.whole(&self.head, &answer, &tail));
                }
            }
        }
        Err(lost())
    }

    /// Lends the KV that a prefill request asked to keep.
    fn lend(&self, front: &Front, finished: &mut Finished) -> Result<Option<RemoteKv>, ApiError> {
        if !self.keeps {
            return Ok(None);
        }
        let Some((kv, handoff)) = finished.kv.take().zip(front.handoff()) else {
            return Err(ApiError::Internal { detail: "the engine did not keep the prompt's KV".into() });
        };
        let prompt = self.prompt.as_deref().unwrap_or_default();
        Ok(Some(handoff.grant(&self.job_id, prompt, finished.cached_prompt_tokens, kv)?))
    }
}

/// The word for why an answer ended.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Events ended without a last one.
pub(super) fn lost() -> ApiError {
    ApiError::Internal { detail: "the engine ended the request without an answer".into() }
}

fn head(front: &Front, ask: &Ask, id: String, wants_receipt: bool) -> Head {
    Head {
        id,
        created: unix_now(),
        model: front.served().name.clone(),
        logprobs: ask.logprobs,
        token_ids: ask.return_token_ids,
        null_usage: ask.stream && (ask.include_usage || wants_receipt),
    }
}

fn job(ask: Ask, id: String, start: crate::engine::Start) -> Job {
    Job {
        id,
        prompt: ask.prompt,
        sampling: SamplingParams {
            temperature: ask.temperature,
            top_p: ask.top_p,
            seed: ask.seed.unwrap_or_else(random),
        },
        max_tokens: ask.max_tokens,
        stop: ask.stop,
        ignore_eos: ask.ignore_eos,
        start,
        keep_kv: ask.kv == KvAsk::Keep,
        progress: None,
        logprobs: ask.logprobs,
        salt: ask.salt,
    }
}

async fn read_ask(front: &Arc<Front>, endpoint: Endpoint, body: Bytes) -> Result<Ask, ApiError> {
    let read = move |front: &Front, body: &[u8]| request::parse(endpoint, body, front.served(), front.text());
    if body.len() <= INLINE_BODY_BYTES {
        return read(front, &body);
    }
    let front = Arc::clone(front);
    let reading = tokio::task::spawn_blocking(move || read(&front, &body));
    reading.await.unwrap_or_else(|error| {
        Err(ApiError::Internal { detail: format!("reading the request failed: {error}") })
    })
}
