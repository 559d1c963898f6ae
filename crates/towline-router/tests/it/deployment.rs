//! A router on loopback, and clients of it.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use towline_router::{Config, Limits, Router, WorkerUrl};

use crate::{loopback, within};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// A router that serves until dropped.
pub(crate) struct Deployment {
    pub(crate) address: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
    _stop: DropGuard,
}

/// An answer, read whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) async fn of(response: Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        let body = within(body.collect()).await.unwrap().to_bytes();
        Self { status: head.status, headers: head.headers, text: String::from_utf8(body.to_vec()).unwrap() }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }

    /// Status and code of an error in OpenAI's shape.
    pub(crate) fn fault(&self) -> (u16, String) {
        let body: Value = serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not JSON: {self:?}"));
        let error = &body["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{self:?}");
        assert!(error.as_object().unwrap().contains_key("param"), "{self:?}");
        (self.status.as_u16(), error["code"].as_str().unwrap_or_default().to_owned())
    }
}

pub(crate) fn urls(addresses: &[SocketAddr]) -> Vec<WorkerUrl> {
    addresses.iter().map(|address| format!("http://{address}").parse().unwrap()).collect()
}

/// A pair deployment with default limits.
pub(crate) fn pairs(prefill: &[SocketAddr], decode: &[SocketAddr]) -> Config {
    Config { prefill: urls(prefill), decode: urls(decode), ..Config::default() }
}

/// Probes that don't meddle with a test about requests.
pub(crate) fn unprobed(config: Config) -> Config {
    let limits = Limits { probe_interval: Duration::from_secs(3600), failures_max: 1000, ..config.limits };
    Config { limits, ..config }
}

impl Deployment {
    pub(crate) async fn start(config: Config) -> Self {
        let listener = loopback();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (router, token) = (Router::new(config), stop.clone());
        tokio::spawn(async move { router.serve(listener, token).await });
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        Self { address, client, _stop: stop.drop_guard() }
    }

    /// Sends a request; gives the head of its answer.
    pub(crate) async fn send(
        &self,
        request: http::request::Builder,
        body: impl Into<Bytes>,
    ) -> Response<Incoming> {
        within(self.client.request(request.body(Full::new(body.into())).unwrap())).await.unwrap()
    }

    pub(crate) fn to(&self, method: &str, path: &str) -> http::request::Builder {
        Request::builder().method(method).uri(format!("http://{}{path}", self.address))
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        Answer::of(self.send(self.to("POST", path), body).await).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        Answer::of(self.send(self.to("GET", path), "").await).await
    }

    /// A client on a connection of its own, which leaves when dropped.
    pub(crate) async fn leaver(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = body.len();
        let text = format!("POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    /// Waits until `/metrics` has this line.
    pub(crate) async fn metric(&self, line: &str) {
        within(async {
            while !self.get("/metrics").await.text.lines().any(|found| found == line) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}
