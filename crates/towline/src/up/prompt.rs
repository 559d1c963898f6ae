//! The one request of `up --prompt`: sent through the router like any client's, timed as a client sees it.
//!
//! *ttft* is the time from sending the request to the first token; *itl* the mean time between tokens after it.
//! Tokens' ids come with vLLM's extension `return_token_ids`, the receipt with the header `X-Towline-Receipt`, and how
//! much of the prompt each worker computed from the workers' own counters (they are fresh, so all is this request's).

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::deployment::{Started, Workers};
use super::http;
use crate::cli::UpArgs;

/// Longest line of an event stream, bytes: a chunk holds a token, the last one a receipt.
const LINE_BYTES_MAX: usize = 1 << 20;
/// The counter of prompt tokens that a worker computed itself.
const COMPUTED: &str = "towline_prompt_tokens_computed_total";

/// What came back.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) ttft: Option<Duration>,
    pub(crate) itl: Option<Duration>,
    /// Prompt tokens computed by the prefill worker and by the decode worker.
    pub(crate) computed: (u64, u64),
    pub(crate) receipt: Option<Value>,
}

/// Sends the prompt and reads the answer to its end.
pub(crate) async fn ask(started: &Started, text: &str, args: &UpArgs) -> Result<Answer> {
    let sent = Instant::now();
    let response = http::send(&started.http, request(started, text, args)?).await?;
    let status = response.status();
    if status != ::http::StatusCode::OK {
        bail!("the router answered {status}: {}", error_message(&http::text(response).await?));
    }
    let mut answer = read(response.into_body(), sent).await?;
    answer.computed = match &started.workers {
        Workers::Pair { prefill, decode } => {
            (http::counter(prefill, COMPUTED).await?, http::counter(decode, COMPUTED).await?)
        }
        Workers::Aggregated(worker) => (http::counter(worker, COMPUTED).await?, 0),
    };
    Ok(answer)
}

fn request(started: &Started, text: &str, args: &UpArgs) -> Result<::http::Request<Full<Bytes>>> {
    let mut body = json!({
        "model": started.model,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream": true,
        "stream_options": { "include_usage": true },
        "return_token_ids": true,
    });
    let path = if args.raw {
        body["prompt"] = text.into();
        "/v1/completions"
    } else {
        body["messages"] = json!([{ "role": "user", "content": text }]);
        "/v1/chat/completions"
    };
    ::http::Request::post(path)
        .header("content-type", "application/json")
        .header("x-towline-receipt", "1")
        .body(Full::new(Bytes::from(body.to_string())))
        .context("not a request")
}

async fn read(mut body: Incoming, sent: Instant) -> Result<Answer> {
    let mut stream = Stream::default();
    let mut reading = Reading { sent, first: None, last: sent, answer: Answer::default() };
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the answer broke off")?;
        let Some(data) = frame.data_ref() else { continue };
        for event in stream.push(data)? {
            if event == "[DONE]" {
                return Ok(reading.finish());
            }
            reading.take(&serde_json::from_str(&event).with_context(|| format!("not JSON: {event}"))?)?;
        }
    }
    bail!("the answer ended without [DONE]")
}

/// The answer while it comes in.
struct Reading {
    sent: Instant,
    first: Option<Instant>,
    last: Instant,
    answer: Answer,
}

impl Reading {
    fn take(&mut self, chunk: &Value) -> Result<()> {
        if !chunk["error"].is_null() {
            bail!("the answer ended in an error: {}", error_message(&chunk.to_string()));
        }
        let choice = &chunk["choices"][0];
        let ids = choice["token_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        if !ids.is_empty() {
            self.last = Instant::now();
            self.first.get_or_insert(self.last);
        }
        for id in ids {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            self.answer.token_ids.push(id.ok_or_else(|| anyhow!("not a token id in {chunk}"))?);
        }
        let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str());
        self.answer.text.push_str(piece.unwrap_or_default());
        let receipt = &chunk["usage"]["towline_receipt"];
        if !receipt.is_null() {
            self.answer.receipt = Some(receipt.clone());
        }
        Ok(())
    }

    fn finish(mut self) -> Answer {
        self.answer.ttft = self.first.map(|first| first - self.sent);
        let gaps = u32::try_from(self.answer.token_ids.len().saturating_sub(1)).unwrap_or(u32::MAX);
        self.answer.itl = self.first.and_then(|first| (self.last - first).checked_div(gaps));
        self.answer
    }
}

/// The `data` fields of a server-sent event stream, out of chunks cut anywhere.
#[derive(Debug, Default)]
struct Stream {
    rest: Vec<u8>,
}

impl Stream {
    fn push(&mut self, data: &[u8]) -> Result<Vec<String>> {
        self.rest.extend_from_slice(data);
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else {
            if self.rest.len() > LINE_BYTES_MAX {
                bail!("a line of the answer is longer than {LINE_BYTES_MAX} bytes");
            }
            return Ok(Vec::new());
        };
        let tail = self.rest.split_off(end + 1);
        let whole =
            String::from_utf8(std::mem::replace(&mut self.rest, tail)).context("the answer is not UTF-8")?;
        let data = whole.lines().filter_map(|line| line.strip_prefix("data:"));
        Ok(data.map(|text| text.trim_start().to_owned()).collect())
    }
}

/// The message inside an OpenAI error body, or the body.
fn error_message(body: &str) -> String {
    let parsed: Value = serde_json::from_str(body).unwrap_or_default();
    parsed["error"]["message"].as_str().unwrap_or(body).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_any_cut() {
        let text = "data: {\"a\":\"é\"}\n\n: ping\n\ndata:[DONE]\n\n".as_bytes();
        for cut in 0..=text.len() {
            let mut stream = Stream::default();
            let mut events = stream.push(&text[..cut]).unwrap();
            events.extend(stream.push(&text[cut..]).unwrap());
            assert_eq!(events, ["{\"a\":\"é\"}", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn chunks_add_up_to_an_answer() {
        let sent = Instant::now();
        let mut reading = Reading { sent, first: None, last: sent, answer: Answer::default() };
        for chunk in [
            json!({"choices":[{"delta":{"role":"assistant"}}]}),
            json!({"choices":[{"delta":{"content":"Pa"},"token_ids":[5]}]}),
            json!({"choices":[{"text":"ris","token_ids":[6, 7]}]}),
            json!({"choices":[],"usage":{"towline_receipt":{"bytes":9}}}),
        ] {
            reading.take(&chunk).unwrap();
        }
        let answer = reading.finish();
        assert_eq!((answer.text.as_str(), answer.token_ids.as_slice()), ("Paris", [5, 6, 7].as_slice()));
        assert!(answer.ttft.is_some() && answer.itl.is_some());
        assert_eq!(answer.receipt.unwrap()["bytes"], 9);
    }

    #[test]
    fn error_in_the_stream_is_an_error() {
        let sent = Instant::now();
        let mut reading = Reading { sent, first: None, last: sent, answer: Answer::default() };
        let error = reading.take(&json!({"error":{"message":"prefill went away"}})).unwrap_err();
        assert!(error.to_string().contains("prefill went away"));
    }
}
