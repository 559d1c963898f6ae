//! The bodies of legs, written straight from the client's fields: no copy of the prompt is made but the last.
//!
//! Order is the client's; what the router sets stands where the client had it, or at the end.

use bytes::Bytes;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;
use towline_wire::kv_params::{KV_TRANSFER_PARAMS, PrefillParams};

use crate::request::{Endpoint, Request};

/// Fields that a prefill leg must not carry: they ask for more than one token of one sequence, or for what the
/// decode leg will deliver. (`min_tokens` above 1 alone makes vLLM fail the leg.)
const NOT_FOR_PREFILL: [&str; 9] = [
    "stream_options",
    "n",
    "best_of",
    "min_tokens",
    "min_completion_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
];

/// Room for what a leg adds, bytes; prefill's parameters for a thousand blocks fit.
const SETTINGS_BYTES: usize = 8 << 10;

/// What a leg does with the client's fields.
struct LegBody<'a> {
    request: &'a Request,
    dropped: &'a [&'static str],
    set: &'a [(&'static str, Setting<'a>)],
}

enum Setting<'a> {
    Stream,
    OneToken,
    AskForKv,
    Kv(&'a RawValue),
}

impl Serialize for Setting<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Stream => to.serialize_bool(false),
            Self::OneToken => to.serialize_u64(1),
            Self::AskForKv => PrefillParams::ASK.serialize(to),
            Self::Kv(kv) => kv.serialize(to),
        }
    }
}

impl Serialize for LegBody<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let fields = &self.request.fields;
        let mut map = to.serialize_map(None)?;
        for (name, value) in fields.iter() {
            match self.set.iter().find(|(set, _)| *set == name) {
                Some((_, setting)) => map.serialize_entry(name, setting)?,
                None if self.dropped.contains(&name) => {}
                None => map.serialize_entry(name, value)?,
            }
        }
        for (name, setting) in self.set.iter().filter(|(name, _)| !fields.has(name)) {
            map.serialize_entry(name, setting)?;
        }
        map.end()
    }
}

impl LegBody<'_> {
    fn write(&self) -> Bytes {
        let mut text = Vec::with_capacity(self.request.fields.size_bytes() + SETTINGS_BYTES);
        // Names are strings, values came out of JSON, memory takes what is written: nothing here can fail, and an
        // empty body would be refused.
        if serde_json::to_writer(&mut text, self).is_err() {
            text.clear();
        }
        text.into()
    }
}

/// The prefill leg: one token of one sequence, not streamed (a streamed answer carries no parameters), KV kept.
pub(super) fn prefill(request: &Request) -> Bytes {
    let chat = [
        ("stream", Setting::Stream),
        ("max_tokens", Setting::OneToken),
        ("max_completion_tokens", Setting::OneToken),
        (KV_TRANSFER_PARAMS, Setting::AskForKv),
    ];
    let completions = [
        ("stream", Setting::Stream),
        ("max_tokens", Setting::OneToken),
        (KV_TRANSFER_PARAMS, Setting::AskForKv),
    ];
    let set = match request.endpoint {
        Endpoint::Chat => &chat[..],
        Endpoint::Completions => &completions[..],
    };
    LegBody { request, dropped: &NOT_FOR_PREFILL, set }.write()
}

/// The decode leg: the client's request, and where its KV is.
pub(super) fn decode(request: &Request, kv: &RawValue) -> Bytes {
    LegBody { request, dropped: &[], set: &[(KV_TRANSFER_PARAMS, Setting::Kv(kv))] }.write()
}

/// The only leg to an aggregated worker: the client's request.
pub(super) fn aggregated(request: &Request) -> Bytes {
    LegBody { request, dropped: &[], set: &[] }.write()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(endpoint: Endpoint, body: &str) -> Request {
        Request::parse(endpoint, body.as_bytes()).unwrap()
    }

    #[test]
    fn chat_prefill_leg_asks_for_one_token_and_its_kv() {
        let body = r#"{"messages":[{"role":"user","content":"é\u0000"}],"max_tokens":9,"model":"m","n":2,
            "stream":true,"stream_options":{"include_usage":true},"temperature":0.70,"min_tokens":4,
            "logprobs":true,"top_logprobs":3,"seed":18446744073709551615}"#;
        assert_eq!(
            prefill(&request(Endpoint::Chat, body)),
            r#"{"messages":[{"role":"user","content":"é\u0000"}],"max_tokens":1,"model":"m","stream":false,"temperature":0.70,"seed":18446744073709551615,"max_completion_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#
        );
    }

    #[test]
    fn completions_prefill_leg_has_no_chat_fields() {
        let body = r#"{"model":"m","prompt":[1,2],"echo":true,"best_of":3,"prompt_logprobs":1,"stop":["a"]}"#;
        assert_eq!(
            prefill(&request(Endpoint::Completions, body)),
            r#"{"model":"m","prompt":[1,2],"stop":["a"],"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#
        );
    }

    #[test]
    fn decode_leg_is_the_clients_request_and_the_parameters() {
        let kv = RawValue::from_string(r#"{"remote_block_ids": [[1, 2]],"x":1e3}"#.to_owned()).unwrap();
        let body = r#"{"model":"m","stream":true,"kv_transfer_params":{"evil":1},"n":2,"max_tokens":9}"#;
        let request = request(Endpoint::Chat, body);
        assert_eq!(
            decode(&request, &kv),
            r#"{"model":"m","stream":true,"n":2,"max_tokens":9,"kv_transfer_params":{"remote_block_ids": [[1, 2]],"x":1e3}}"#
        );
        assert_eq!(aggregated(&request), r#"{"model":"m","stream":true,"n":2,"max_tokens":9}"#);
    }
}
