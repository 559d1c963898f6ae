//! One function a decoder: what must hold for any bytes. Called by the stable test beside it and by the cargo-fuzz
//! targets in `crates/towline-wire/fuzz`.
//!
//! Each says whether it took the bytes. It asserts more than that nothing panics: what decodes must encode to something
//! that decodes to the same value, bounds must hold, and what is sealed must open exactly when it is what the key's
//! holder made. Lengths stand for memory: where a decoder allocates, what it made is held against its bound.

mod bytes;
mod json;
mod messages;

pub(crate) use bytes::{challenge, fence_slot, frame, handshake, reply, request};
pub(crate) use json::{digests, layout, prefill_params, remote_kv, ticket};
pub(crate) use messages::{agent_card, carried_card, control, engine_card};

use towline_wire::auth::ClusterKey;

/// The key of every session and ticket here; seeds are sealed with it.
pub(crate) fn key() -> ClusterKey {
    ClusterKey::from_bytes([7; 32])
}

/// The server's nonce in handshakes here.
pub(crate) const SERVER_NONCE: [u8; 32] = [2; 32];
