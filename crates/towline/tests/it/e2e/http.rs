//! Requests without a client library, so that what is on the wire is what is checked.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::process::PATIENCE;

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The message and the code of an error in OpenAI's shape.
    pub(crate) fn error(&self) -> (String, String) {
        let error = &self.json()["error"];
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        assert!(error["message"].is_string() && error["type"].is_string(), "not OpenAI's shape: {self:?}");
        (text("message"), text("code"))
    }
}

pub(crate) fn get(base: &str, path: &str) -> Answer {
    send(base, &format!("GET {path} HTTP/1.0\r\n\r\n"))
}

pub(crate) fn post(base: &str, path: &str, body: &Value) -> Answer {
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.0\r\ncontent-type: application/json\r\nx-towline-receipt: 1\r\n");
    send(base, &format!("{head}content-length: {}\r\n\r\n{body}", body.len()))
}

/// A chat of one message with the model `tiny`, at temperature 0.
pub(crate) fn chat(base: &str, text: &str) -> Answer {
    post(base, "/v1/chat/completions", &question(text))
}

/// The body of [`chat`].
pub(crate) fn question(text: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0})
}

/// HTTP/1.0, so that the body is all that follows the head, in one piece.
fn send(base: &str, request: &str) -> Answer {
    let mut stream = TcpStream::connect(base.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Answer { status: status.expect("a status"), head: head.to_owned(), body: body.to_owned() }
}

/// The sum of the samples of a metric whose line holds `label`.
pub(crate) fn metric(base: &str, name: &str, label: &str) -> f64 {
    let page = get(base, "/metrics").body;
    let lines = page.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(label)
    });
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
