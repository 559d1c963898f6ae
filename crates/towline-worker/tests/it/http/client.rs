//! A plain HTTP client, and a front to talk to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use towline_worker::http::{Front, FrontParts, router, serve};

/// Longest wait for what must happen soon; a bound for broken code, not a pause.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A served front; ends with the value.
pub(crate) struct Served {
    pub(crate) front: Arc<Front>,
    pub(crate) address: SocketAddr,
    pub(crate) stop: CancellationToken,
    pub(crate) serving: JoinHandle<usize>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(crate) async fn serve_front(parts: FrontParts) -> Served {
    let front = Front::new(parts);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let serving =
        tokio::spawn(serve(listener, router(Arc::clone(&front)), front.limits().clone(), stop.clone()));
    Served { front, address, stop, serving }
}

/// A whole answer.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// `error.code` and `error.param`.
    pub(crate) fn fault(&self) -> (String, Option<String>) {
        let error = &self.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.body);
        (error["code"].as_str().unwrap_or_default().into(), error["param"].as_str().map(str::to_owned))
    }

    /// The data of each event, `[DONE]` included.
    pub(crate) fn events(&self) -> Vec<&str> {
        assert!(self.body.ends_with("\n\n"), "{:?}", self.body);
        self.body.trim_end().split("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect()
    }
}

/// Sends a request and returns its answer with the body still to come.
async fn open(address: SocketAddr, request: Request<Full<Bytes>>) -> Response<Incoming> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    tokio::time::timeout(SOON, sender.send_request(request)).await.expect("an answer").unwrap()
}

/// Sends a request and collects its answer.
pub(crate) async fn call(address: SocketAddr, request: Request<Full<Bytes>>) -> Reply {
    let response = open(address, request).await;
    let (status, headers) = (response.status(), response.headers().clone());
    let body = tokio::time::timeout(SOON, response.into_body().collect()).await.expect("a body").unwrap();
    Reply { status, headers, body: String::from_utf8(body.to_bytes().to_vec()).unwrap() }
}

/// The value of a metric, by the beginning of its line.
pub(crate) async fn metric_at(address: SocketAddr, name: &str) -> Option<f64> {
    let text = call(address, request("GET", "/metrics", &[], "")).await.body;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.parse().ok()
}

impl Served {
    pub(crate) async fn open(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        open(self.address, request).await
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Reply {
        call(self.address, request).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(request("POST", path, &[], body.to_string())).await
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(request("GET", path, &[], "")).await
    }

    pub(crate) async fn metric(&self, name: &str) -> Option<f64> {
        metric_at(self.address, name).await
    }
}

pub(crate) fn request(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Request<Full<Bytes>> {
    let mut builder = Request::builder().method(method).uri(path).header("host", "localhost");
    if !headers.iter().any(|(name, _)| *name == "content-type") {
        builder = builder.header("content-type", "application/json");
    }
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(Full::new(body.into())).unwrap()
}

/// Waits until `condition` holds, asking again whenever other tasks had their turn.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("never happened: {what}"));
}
