//! What a router is told at its start: its workers and its bounds. Every bound has a unit and a reason here.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use thiserror::Error;

/// A deployment, as the router sees it.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Workers that compute prompts and keep their KV for a decode worker.
    pub prefill: Vec<WorkerUrl>,
    /// Workers that fetch KV and write tokens.
    pub decode: Vec<WorkerUrl>,
    /// Workers that do both; used when no prefill and decode pair is usable.
    pub aggregated: Vec<WorkerUrl>,
    /// Send the client's `Authorization` header on to workers. Off by default: a client's key is for the front,
    /// and a worker has no use for it.
    pub forward_authorization: bool,
    /// Bounds on everything that waits, grows or repeats.
    pub limits: Limits,
}

/// Bounds, with their reasons. [`Limits::default`] suits a deployment of tens of workers.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest request body, bytes. 16 MiB holds a prompt of a million tokens twice over.
    pub body_bytes_max: usize,
    /// Longest time for a client to send its body, once its head is in: a trickling client holds memory.
    pub body_timeout: Duration,
    /// Longest time a client may take none of an answer that waits for it: its worker would wait too.
    pub client_stall_timeout: Duration,
    /// All request bodies held at once, bytes (rounded up to KiB each): requests in flight, each of the largest
    /// size, would not fit in memory.
    pub bodies_bytes_max: usize,
    /// Requests in flight; more are answered 503 at once, which is kinder than a queue without end.
    pub requests_in_flight_max: usize,
    /// Client connections; more wait in the listener's backlog.
    pub connections_max: usize,
    /// Longest time for a client to send a request's head, and so also for a connection to lie idle.
    pub client_head_timeout: Duration,
    /// Largest request or response head, bytes (hyper's floor is 8192): a head is never longer for a good reason.
    pub head_bytes_max: usize,
    /// Most header lines in a request or response.
    pub headers_max: usize,
    /// Longest time to reach a worker: past it, another one is asked. A SYN lost to a burst is sent again after 1
    /// and 3 s.
    pub connect_timeout: Duration,
    /// Longest prefill leg, queueing included. Longer than a prefill takes, shorter than people wait.
    pub prefill_timeout: Duration,
    /// Longest wait for the head of a decode worker's answer; without streaming that is the whole generation.
    pub decode_head_timeout: Duration,
    /// Longest silence inside an answer's body: past it the worker is taken for dead.
    pub body_idle_timeout: Duration,
    /// Largest answer held whole, bytes: a prefill answer (block ids of a million tokens take half a MiB) and an
    /// answer that isn't streamed.
    pub answer_bytes_max: usize,
    /// Time between health probes of one worker: an idle router must stay far below 1 % of a core.
    pub probe_interval: Duration,
    /// Longest health probe or model listing.
    pub probe_timeout: Duration,
    /// Consecutive failures of requests that start a cool-down, and of probes that take a worker out.
    pub failures_max: u32,
    /// How long a worker that failed is left alone.
    pub cool_down: Duration,
    /// Least time between two listings of models caused by requests for an unknown one.
    pub models_refresh_interval: Duration,
    /// Idle connections kept to one worker: opening one costs a round trip of TTFT.
    pub idle_connections_max: usize,
    /// How long an idle connection is kept: below uvicorn's 5 s, or a request meets a connection being closed.
    pub idle_connection_timeout: Duration,
    /// After the stop signal: how long open requests may take to end.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 16 << 20,
            body_timeout: Duration::from_secs(30),
            client_stall_timeout: Duration::from_secs(60),
            bodies_bytes_max: 1 << 30,
            requests_in_flight_max: 4096,
            connections_max: 8192,
            client_head_timeout: Duration::from_secs(60),
            head_bytes_max: 64 << 10,
            headers_max: 100,
            connect_timeout: Duration::from_secs(4),
            prefill_timeout: Duration::from_secs(120),
            decode_head_timeout: Duration::from_secs(600),
            body_idle_timeout: Duration::from_secs(120),
            answer_bytes_max: 16 << 20,
            probe_interval: Duration::from_secs(5),
            probe_timeout: Duration::from_secs(2),
            failures_max: 3,
            cool_down: Duration::from_secs(5),
            models_refresh_interval: Duration::from_secs(5),
            idle_connections_max: 512,
            idle_connection_timeout: Duration::from_secs(4),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// Where a worker listens: `http://host:port` with an optional path in front of `/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerUrl {
    authority: Authority,
    prefix: String,
}

/// Why a worker's URL was refused. All are faults of the configuration; none is worth a retry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WorkerUrlError {
    /// Not a URL; write `http://host:port`.
    #[error("not a URL: write http://host:port")]
    Malformed,
    /// A scheme other than `http`; workers stand behind plain HTTP on a private network.
    #[error("scheme is {0:?}: workers are reached over http")]
    Scheme(String),
    /// A user name or password: it would end in logs and labels.
    #[error("credentials in a worker's URL: remove them")]
    Credentials,
    /// A query or fragment, which a base URL can't have.
    #[error("a worker's URL has no query: remove what follows '?'")]
    Query,
}

impl FromStr for WorkerUrl {
    type Err = WorkerUrlError;

    fn from_str(text: &str) -> Result<Self, WorkerUrlError> {
        if text.contains(['?', '#']) {
            return Err(WorkerUrlError::Query);
        }
        let uri = Uri::from_str(text).map_err(|_| WorkerUrlError::Malformed)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(other) => return Err(WorkerUrlError::Scheme(other.to_owned())),
            None => return Err(WorkerUrlError::Malformed),
        }
        let authority = uri.authority().ok_or(WorkerUrlError::Malformed)?.clone();
        if authority.as_str().contains('@') {
            return Err(WorkerUrlError::Credentials);
        }
        Ok(Self { authority, prefix: uri.path().trim_end_matches('/').to_owned() })
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.prefix)
    }
}

impl WorkerUrl {
    /// The full address of `path` (which begins with a slash) at this worker.
    pub(crate) fn at(&self, path: &str) -> Result<Uri, http::Error> {
        let path = PathAndQuery::from_maybe_shared(format!("{}{path}", self.prefix))?;
        Uri::builder().scheme(Scheme::HTTP).authority(self.authority.clone()).path_and_query(path).build()
    }

    /// `host:port`, which no client may see.
    pub(crate) fn authority(&self) -> &str {
        self.authority.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_url_joins_paths_under_its_prefix() {
        let plain: WorkerUrl = "http://127.0.0.1:8000/".parse().unwrap();
        assert_eq!(plain.at("/v1/models").unwrap(), "http://127.0.0.1:8000/v1/models");
        let under: WorkerUrl = "http://[::1]:8000/engine/a".parse().unwrap();
        assert_eq!(under.at("/health").unwrap(), "http://[::1]:8000/engine/a/health");
        assert_eq!(under.to_string(), "http://[::1]:8000/engine/a");
    }

    #[test]
    fn worker_url_refuses_credentials_schemes_and_queries() {
        let parse = |text: &str| text.parse::<WorkerUrl>().unwrap_err();
        assert_eq!(parse("http://me:secret@host:1"), WorkerUrlError::Credentials);
        assert_eq!(parse("https://host:1"), WorkerUrlError::Scheme("https".into()));
        assert_eq!(parse("http://host:1/?a=b"), WorkerUrlError::Query);
        assert_eq!(parse("host:1"), WorkerUrlError::Malformed);
        assert_eq!(parse(""), WorkerUrlError::Malformed);
        assert!(!parse("http://me:secret@host:1").to_string().contains("secret"));
    }
}
