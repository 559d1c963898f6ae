//! Workers that do what a test says, and tell it what they were sent.

use std::future::{Future, pending};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::unfold;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{loopback, within};

/// What a worker was sent.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Seen {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;
type Script = Arc<dyn Fn(Seen, Gone) -> Answering + Send + Sync>;

/// Tells the test, when dropped, that the worker's side of a request has ended.
pub(crate) struct Gone(UnboundedSender<()>);

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// A scripted worker.
pub(crate) struct Mock {
    pub(crate) address: SocketAddr,
    seen: UnboundedReceiver<Seen>,
    gone: UnboundedReceiver<()>,
}

impl Mock {
    /// A worker that answers its `POST`s by `script`, is healthy, and lists the model `m`.
    pub(crate) async fn start<F, A>(script: F) -> Self
    where
        F: Fn(Seen, Gone) -> A + Send + Sync + 'static,
        A: Future<Output = Response> + Send + 'static,
    {
        Self::listing(&["m"], script).await
    }

    /// The same with other models.
    pub(crate) async fn listing<F, A>(models: &'static [&'static str], script: F) -> Self
    where
        F: Fn(Seen, Gone) -> A + Send + Sync + 'static,
        A: Future<Output = Response> + Send + 'static,
    {
        let script: Script = Arc::new(move |seen, gone| Box::pin(script(seen, gone)));
        let (seen_by, seen) = unbounded_channel();
        let (gone_by, gone) = unbounded_channel();
        let app = axum::Router::new().fallback(move |request: Request| {
            let (script, seen_by, gone_by) = (Arc::clone(&script), seen_by.clone(), gone_by.clone());
            async move {
                match request.uri().path() {
                    "/health" => return StatusCode::OK.into_response(),
                    "/v1/models" => return listing(models),
                    _ => {}
                }
                let (head, body) = request.into_parts();
                let body = to_bytes(body, usize::MAX).await.unwrap();
                let seen = Seen { path: head.uri.path().to_owned(), headers: head.headers, body };
                let _ = seen_by.send(seen.clone());
                script(seen, Gone(gone_by)).await
            }
        });
        let listener = loopback();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, seen, gone }
    }

    /// A prefill worker as it should be.
    pub(crate) async fn prefill() -> Self {
        Self::start(|_, _| async { prefill_answer(KV) }).await
    }

    /// A decode worker as it should be.
    pub(crate) async fn decode() -> Self {
        Self::start(|seen, _| async move { decode_answer(&seen) }).await
    }

    /// A worker that takes requests and never answers.
    pub(crate) async fn hanging() -> Self {
        Self::start(|_, gone| async move {
            let _gone = gone;
            pending().await
        })
        .await
    }

    /// A worker that answers with one status and body.
    pub(crate) async fn status(status: u16, body: &'static str) -> Self {
        Self::start(move |_, _| async move { json_answer(StatusCode::from_u16(status).unwrap(), body) }).await
    }

    /// What it is sent next.
    pub(crate) async fn next(&mut self) -> Seen {
        within(self.seen.recv()).await.unwrap()
    }

    /// Requests it has been sent and the test hasn't taken.
    pub(crate) fn waiting(&self) -> usize {
        self.seen.len()
    }

    /// Waits until its side of a request has ended.
    pub(crate) async fn gone(&mut self) {
        within(self.gone.recv()).await.unwrap();
    }
}

/// A worker that answers every connection with these bytes, once it has read something, and closes it.
pub(crate) async fn raw(answer: &'static [u8]) -> SocketAddr {
    let listener = loopback();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 65536]).await;
                let _ = stream.write_all(answer).await;
            });
        }
    });
    address
}

/// An address where nobody listens.
pub(crate) async fn nobody() -> SocketAddr {
    let listener = loopback();
    listener.local_addr().unwrap()
}

/// `kv_transfer_params` as a vLLM 0.32 prefill worker gave them, with its spaces and nulls.
pub(crate) const KV: &str = r#"{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "5b1c2f8e-8d4b-4a52-9a4b-9b7f3e1d2c00", "remote_request_id": "chatcmpl-r1-0a1b2c3d", "remote_host": "10.0.0.7", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 40, "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0, "towline": {"sealed": "AAEC"}}"#;

pub(crate) fn prefill_answer(kv: &str) -> Response {
    let text =
        r#"{"id":"x","object":"chat.completion","choices":[{"index":0,"text":"a"}],"kv_transfer_params":"#;
    json_answer(StatusCode::OK, format!("{text}{kv}}}"))
}

/// Three events and the end, or one object, as the request says.
pub(crate) fn decode_answer(seen: &Seen) -> Response {
    if seen.json()["stream"] == json!(true) {
        let events = ["data: {\"n\":1}\n\n", "data: {\"n\":2}\n\n", "data: [DONE]\n\n"];
        return event_stream(Body::from(events.concat()));
    }
    json_answer(StatusCode::OK, r#"{"id":"y","choices":[],"kv_transfer_params":null,"usage":{}}"#)
}

/// A stream whose frames the test sends; an error breaks the connection.
pub(crate) fn scripted_stream(frames: UnboundedReceiver<Frame>, gone: Gone) -> Response {
    let frames = unfold((frames, gone), |(mut frames, gone)| async move {
        let frame = frames.recv().await?;
        Some((frame.map_err(std::io::Error::other), (frames, gone)))
    });
    event_stream(Body::from_stream(frames))
}

pub(crate) type Frame = Result<Bytes, &'static str>;

pub(crate) fn event_stream(body: Body) -> Response {
    let headers = [
        ("content-type", "text/event-stream; charset=utf-8"),
        ("server", "worker 10.0.0.7:8000"),
        ("x-served-by", "10.0.0.7:8000"),
        ("location", "http://10.0.0.7:8000/"),
    ];
    (headers, body).into_response()
}

pub(crate) fn json_answer(status: StatusCode, body: impl Into<Body>) -> Response {
    let headers = [("content-type", "application/json"), ("server", "worker 10.0.0.7:8000")];
    (status, headers, body.into()).into_response()
}

fn listing(models: &[&str]) -> Response {
    let data: Vec<_> =
        models.iter().map(|id| json!({"id": id, "object": "model", "root": "/secret"})).collect();
    json_answer(StatusCode::OK, json!({"object": "list", "data": data}).to_string())
}
