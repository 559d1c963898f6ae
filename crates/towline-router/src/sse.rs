//! Server-sent events, as far as a router cares: where one ends, and whether the last one was the last.
//!
//! Frames pass as they arrive; only the beginning of an event whose end is still on its way is kept back, so that
//! a worker dying in the middle of one never leaves half an event in front of the error that follows.
//! Cost: an engine writes whole events, so the usual frame is looked at from its end, twice, and not copied.

use bytes::{Bytes, BytesMut};
use towline_wire::openai::ErrorBody;

use crate::error;

/// Longest part of an event kept back, bytes; past it bytes pass as they come.
const PARTIAL_BYTES_MAX: usize = 1 << 20;

/// A stream of events in passing.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// The part of an event whose end hasn't arrived.
    partial: BytesMut,
    /// What passed last: shared with the frame, not copied.
    last: Bytes,
}

/// How a stream that has ended ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With `[DONE]`.
    Done,
    /// With the worker's own error event.
    Reported,
    /// With neither: a connection closed in good order says nothing about the generation.
    Cut,
}

impl Events {
    /// Takes what arrived; gives what may pass.
    pub(crate) fn push(&mut self, frame: Bytes) -> Option<Bytes> {
        let whole = self.split(frame);
        let passed = match whole.is_empty() {
            true if self.partial.len() > PARTIAL_BYTES_MAX => self.partial.split().freeze(),
            _ => whole,
        };
        if passed.is_empty() {
            return None;
        }
        self.last = passed.clone();
        Some(passed)
    }

    /// The whole events there are now; what follows them is kept.
    fn split(&mut self, mut frame: Bytes) -> Bytes {
        if self.partial.is_empty() {
            let whole = frame.split_to(end(&frame));
            self.partial.extend_from_slice(&frame);
            whole
        } else {
            self.partial.extend_from_slice(&frame);
            let length = end(&self.partial);
            self.partial.split_to(length).freeze()
        }
    }

    /// The stream has ended: how, and what is left to pass.
    pub(crate) fn finish(&mut self) -> (Ending, Bytes) {
        let rest = self.partial.split().freeze();
        let last = if rest.is_empty() { std::mem::take(&mut self.last) } else { rest.clone() };
        (ending(&last), rest)
    }
}

/// Tells the ending from the stream's last bytes.
fn ending(last: &[u8]) -> Ending {
    let text = last.trim_ascii_end();
    // Past the last empty line stands the last event.
    let event = text.get(end(text)..).unwrap_or_default();
    match event.strip_prefix(b"data:").map(<[u8]>::trim_ascii_start) {
        Some(b"[DONE]") => Ending::Done,
        Some(data) if data.starts_with(b"{\"error\"") => Ending::Reported,
        _ => Ending::Cut,
    }
}

/// The length of the whole events at the beginning of `bytes`: up to the last empty line. Line ends may be LF or
/// CR LF (WHATWG HTML, server-sent events; a lone CR is allowed there, and written by nobody).
fn end(bytes: &[u8]) -> usize {
    let mut last = bytes.len();
    while let Some(newline) = bytes[..last].iter().rposition(|&byte| byte == b'\n') {
        let line = &bytes[..newline];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() || line.ends_with(b"\n") {
            return newline + 1;
        }
        last = newline;
    }
    0
}

/// The event that ends a broken stream; no `[DONE]` follows.
pub(crate) fn error_event(body: &ErrorBody) -> Bytes {
    let json = error::json(body);
    let mut event = BytesMut::with_capacity(json.len() + 8);
    event.extend_from_slice(b"data: ");
    event.extend_from_slice(&json);
    event.extend_from_slice(b"\n\n");
    event.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(events: &mut Events, text: &'static str) -> Option<String> {
        events.push(Bytes::from_static(text.as_bytes())).map(|b| String::from_utf8(b.to_vec()).unwrap())
    }

    #[test]
    fn whole_events_pass_at_once_and_uncopied() {
        let frame = Bytes::from_static(b"data: 1\n\ndata: 2\n\n");
        let out = Events::default().push(frame.clone()).unwrap();
        assert_eq!((out.as_ptr(), out.len()), (frame.as_ptr(), frame.len()));
    }

    #[test]
    fn event_is_kept_until_its_end_arrives() {
        let mut events = Events::default();
        assert_eq!(push(&mut events, "data: 1\n\nda").as_deref(), Some("data: 1\n\n"));
        assert_eq!(push(&mut events, "ta: 2\n"), None);
        assert_eq!(push(&mut events, "\ndata: 3").as_deref(), Some("data: 2\n\n"));
        assert_eq!(events.finish().1, "data: 3");
        assert_eq!(events.finish().1, "");
    }

    #[test]
    fn carriage_returns_end_lines_too() {
        let mut events = Events::default();
        assert_eq!(push(&mut events, "data: 1\r\n\r\n: ping").as_deref(), Some("data: 1\r\n\r\n"));
        assert_eq!(push(&mut events, "\r\n\r\n").as_deref(), Some(": ping\r\n\r\n"));
    }

    #[test]
    fn kept_bytes_are_bounded() {
        let mut events = Events::default();
        assert!(events.push(Bytes::from(vec![b'x'; PARTIAL_BYTES_MAX])).is_none());
        assert_eq!(events.push(Bytes::from_static(b"y")).map(|b| b.len()), Some(PARTIAL_BYTES_MAX + 1));
    }

    #[test]
    fn every_split_gives_back_every_byte() {
        let text = b"data: a\n\n: c\r\n\r\ndata: b\ndata: c\n\ndata: [DONE]\n\n";
        for cut in 0..text.len() {
            let mut events = Events::default();
            let mut out = Vec::new();
            for part in [&text[..cut], &text[cut..]] {
                out.extend(events.push(Bytes::copy_from_slice(part)).into_iter().flatten());
            }
            let (ending, rest) = events.finish();
            out.extend(rest);
            assert_eq!((out.as_slice(), ending), (&text[..], Ending::Done), "cut at {cut}");
        }
    }

    #[test]
    fn endings_are_told_apart() {
        let of = |text: &'static str| {
            let mut events = Events::default();
            push(&mut events, text);
            events.finish().0
        };
        assert_eq!(of("data: 1\n\ndata: [DONE]\n\n"), Ending::Done);
        assert_eq!(of("data: 1\r\n\r\ndata: [DONE]\r\n\r\n"), Ending::Done);
        assert_eq!(of("data:[DONE]"), Ending::Done);
        assert_eq!(of("data: 1\n\ndata: {\"error\":{}}\n\n"), Ending::Reported);
        for cut in ["", "data: 1\n\n", "data: [DON", "data: {\"x\":\"[DONE]\"}\n\n", ": [DONE]\n\n"] {
            assert_eq!(of(cut), Ending::Cut, "{cut:?}");
        }
    }
}
