//! Control messages: what `proto/towline/control/v1.proto` defines, compiled.
//!
//! The generated types are plain data; bounds are checked by [`decode`] and by `card.rs`.

use prost::Message;
use thiserror::Error;

use crate::frame::BODY_BYTES_MAX;

/// The generated types of protocol version 1.
#[expect(missing_docs, reason = "generated; the schema carries the prose")]
#[expect(
    clippy::large_enum_variant,
    reason = "one message lives at a time; a box would be an allocation for nothing"
)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/towline.control.v1.rs"));
}

pub use v1::Control;
pub use v1::control::Body;

/// Longest notification payload in bytes.
pub const NOTIFY_BYTES_MAX: usize = 16 * 1024;
/// Most leases in one heartbeat.
pub const HEARTBEAT_LEASES_MAX: usize = 4096;

/// A message with its call number, ready to be sealed.
pub fn encode(call: u64, body: Body) -> Vec<u8> {
    Control { call, body: Some(body) }.encode_to_vec()
}

/// Reads the body of a control frame.
///
/// # Errors
/// [`ControlError`]; the session is closed after it.
pub fn decode(bytes: &[u8]) -> Result<(u64, Body), ControlError> {
    if bytes.len() > BODY_BYTES_MAX {
        return Err(ControlError::TooLong { length: bytes.len() });
    }
    let message =
        Control::decode(bytes).map_err(|error| ControlError::Malformed { detail: error.to_string() })?;
    let body = message.body.ok_or(ControlError::Empty)?;
    let long = match &body {
        Body::Notify(notify) => notify.payload.len() > NOTIFY_BYTES_MAX,
        Body::Heartbeat(heartbeat) => heartbeat.leases.len() > HEARTBEAT_LEASES_MAX,
        _ => false,
    };
    if long { Err(ControlError::TooLong { length: bytes.len() }) } else { Ok((message.call, body)) }
}

/// Why a control message was refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ControlError {
    /// The peer is broken or hostile.
    #[error("a control message of {length} bytes passes its bound")]
    TooLong {
        /// Bytes found.
        length: usize,
    },
    /// The peer is broken, hostile or of another version.
    #[error("malformed control message: {detail}")]
    Malformed {
        /// The decoder's words.
        detail: String,
    },
    /// The peer knows a message that this build doesn't.
    #[error("a control message of a kind that this build does not know")]
    Empty,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_round_trip_and_bounds_hold() {
        let body = Body::Release(v1::Release { lease: 7, generation: 9 });
        assert_eq!(decode(&encode(3, body.clone())), Ok((3, body)));
        let long = Body::Notify(v1::Notify { payload: vec![0; NOTIFY_BYTES_MAX + 1] });
        assert!(matches!(decode(&encode(0, long)), Err(ControlError::TooLong { .. })));
        assert_eq!(decode(&[8, 1]), Err(ControlError::Empty));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
        }
    }
}
