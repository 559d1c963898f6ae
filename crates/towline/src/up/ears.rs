//! What the children of `up` say: their lines, read as events.
//!
//! A ready line comes on standard output, JSON logs on standard error. Two log events mean something to `up` (see
//! `logs`); of the others it shows warnings and errors, and keeps the last ones to tell how a child ended.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::sync::mpsc::Sender;
use tokio::task::JoinHandle;

use crate::cli::Format;
use crate::{logs, out};

/// Log lines kept to tell how a child ended.
const TAIL_LINES: usize = 12;

/// What a child says.
#[derive(Debug)]
pub(crate) enum Event {
    /// It serves.
    Ready(&'static str, Ready),
    /// It gets on with its start.
    Progress(&'static str, Progress),
    /// It pulled KV: the receipt.
    Transfer(Value),
    /// A log line that `up` shows.
    Log(LogLine),
    /// It ended.
    Ended(&'static str, Ending),
}

/// The ready line of a worker or router.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Ready {
    /// Base URL of its HTTP API.
    pub(crate) http: String,
}

/// How far a step of the start is.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Progress {
    pub(crate) step: String,
    pub(crate) done: u64,
    pub(crate) total: u64,
}

/// A child's log line, for `up` to show in its own format.
#[derive(Debug)]
pub(crate) struct LogLine {
    child: &'static str,
    raw: String,
    format: Format,
}

impl LogLine {
    /// Writes it to standard error.
    pub(crate) fn show(&self) {
        match self.format {
            Format::Human => out::remark(&format!("[{}] {}", self.child, readable(&self.raw))),
            Format::Json => out::remark(&self.raw),
        }
    }
}

/// How a child ended.
#[derive(Debug)]
pub(crate) struct Ending {
    /// Exit status or signal, in words.
    pub(crate) status: String,
    /// Its last lines.
    pub(crate) tail: Vec<String>,
}

/// The last lines a child wrote.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Which pipe a line came by.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pipe {
    Out,
    Err,
}

/// What listens to one child.
#[derive(Clone)]
pub(crate) struct Ears {
    pub(crate) name: &'static str,
    /// Show its warnings and errors only.
    pub(crate) quiet: bool,
    pub(crate) format: Format,
    pub(crate) tail: Tail,
    pub(crate) events: Sender<Event>,
}

impl Ears {
    /// Reads a pipe to its end.
    pub(crate) fn hear(self, pipe: impl AsyncRead + Send + Unpin + 'static, which: Pipe) -> JoinHandle<()> {
        tokio::spawn(async move {
            let mut lines = BufReader::new(pipe).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some(event) = self.understand(line, which)
                    && self.events.send(event).await.is_err()
                {
                    return;
                }
            }
        })
    }

    fn understand(&self, line: String, which: Pipe) -> Option<Event> {
        let fields: Map<String, Value> = serde_json::from_str(&line).unwrap_or_default();
        if which == Pipe::Out {
            return serde_json::from_value(fields.into()).ok().map(|ready| Event::Ready(self.name, ready));
        }
        let target = fields.get("target").and_then(Value::as_str);
        if target == Some(logs::PROGRESS) {
            return serde_json::from_value(fields.into()).ok().map(|step| Event::Progress(self.name, step));
        }
        self.tail.push(readable(&line));
        // A pull that failed has no bytes to tell; it is a warning like others.
        if target == Some(logs::KV_TRANSFER) && fields.contains_key("bytes") {
            return Some(Event::Transfer(fields.into()));
        }
        // What isn't JSON is the child's last word (see `main`), and told when it has ended.
        let level = fields.get("level").and_then(Value::as_str)?;
        let shown = !self.quiet || matches!(level, "WARN" | "ERROR");
        shown.then_some(Event::Log(LogLine { child: self.name, raw: line, format: self.format }))
    }
}

/// A JSON log line as a person reads it; anything else as it is.
fn readable(line: &str) -> String {
    let Ok(mut fields) = serde_json::from_str::<Map<String, Value>>(line) else { return line.to_owned() };
    let mut take = |key: &str| match fields.remove(key) {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let mut text = format!("{} {}", take("level"), take("message"));
    take("timestamp");
    take("target");
    for (key, value) in fields {
        text.push_str(&format!(" {key}={value}"));
    }
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_become_readable() {
        let json = r#"{"timestamp":"t","level":"WARN","message":"slow","target":"x","peer":"p1","ms":3}"#;
        assert_eq!(readable(json), r#"WARN slow ms=3 peer="p1""#);
        assert_eq!(readable("thread 'main' panicked"), "thread 'main' panicked");
    }

    fn heard(line: &str, which: Pipe) -> Option<Event> {
        let (events, _) = tokio::sync::mpsc::channel(1);
        let ears = Ears { name: "decode", quiet: true, format: Format::Json, tail: Tail::default(), events };
        ears.understand(line.to_owned(), which)
    }

    #[test]
    fn lines_become_events() {
        let ready =
            heard(r#"{"event":"listening","http":"http://127.0.0.1:1","kv":"127.0.0.1:2"}"#, Pipe::Out);
        assert!(
            matches!(ready, Some(Event::Ready("decode", Ready { http })) if http == "http://127.0.0.1:1")
        );
        let step =
            heard(r#"{"level":"INFO","target":"progress","step":"weights","done":1,"total":2}"#, Pipe::Err);
        assert!(matches!(step, Some(Event::Progress("decode", Progress { done: 1, total: 2, .. }))));
        let pulled =
            heard(r#"{"level":"INFO","target":"kv_transfer","transport":"shm","bytes":7}"#, Pipe::Err);
        assert!(matches!(pulled, Some(Event::Transfer(receipt)) if receipt["bytes"] == 7));
        let failed = heard(r#"{"level":"WARN","target":"kv_transfer","message":"no KV"}"#, Pipe::Err);
        assert!(matches!(failed, Some(Event::Log(_))));
        assert!(heard(r#"{"level":"INFO","target":"x","message":"fine"}"#, Pipe::Err).is_none());
        assert!(heard("not JSON", Pipe::Out).is_none() && heard("not JSON", Pipe::Err).is_none());
    }
}
