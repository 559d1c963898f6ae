//! Control sessions: handshakes, cards and their changes, releases, heartbeats, notifications.
//!
//! One listener serves control and data; the Hello says which. A stranger gets one proof that depends on the key he
//! does not have, and then silence: no name, no version, no error text. The messages and their bounds are
//! `towline_wire::control`'s; here are the sockets.
//!
//! ```text
//!   listener ──accept──> greeting ──purpose──> control server │ tcp server │ shm server
//!   open_control ──> dialling ──> control client ──card──> connect.rs
//! ```

mod client;
mod dialling;
mod greeting;
mod listener;
mod server;
mod subscribers;

use towline_wire::auth::Identity;
use towline_wire::control::{Body, decode, encode, v1};
use towline_wire::frame::FrameKind;
use towline_wire::id::BootEpoch;

pub(crate) use client::{Dialled, Link, LinkEvents, open_control};
pub(crate) use dialling::{Dialling, Welcome};
pub(crate) use listener::{Listener, ServeUnix};
pub(crate) use subscribers::Subscribers;

use crate::agent::Environment;
use crate::error::SessionError;
use crate::io::Channel;

/// Answers a card request, on sessions of any purpose.
///
/// # Errors
/// [`SessionError::Protocol`] for a frame that is no card request.
pub(crate) fn answer_card(
    channel: &mut Channel,
    body: &[u8],
    environment: &Environment,
) -> Result<(), SessionError> {
    let (call, Body::CardRequest(_)) = decode(body)? else {
        return Err(SessionError::Protocol("a message that does not belong on a data session".into()));
    };
    channel.send(FrameKind::Control, &encode(call, Body::Card(environment.card().to_wire())))
}

/// Asks for the card: the first message of a client's session of any purpose.
///
/// # Errors
/// [`SessionError::Protocol`] before the handshake.
pub(crate) fn request_card(channel: &mut Channel, call: u64) -> Result<(), SessionError> {
    channel.send(FrameKind::Control, &encode(call, Body::CardRequest(v1::CardRequest {})))
}

/// Checks that a data session ends at the agent, and the incarnation, whose card the control session brought.
///
/// # Errors
/// [`SessionError::Protocol`], [`SessionError::Restarted`].
pub(crate) fn check_card(kind: FrameKind, body: &[u8], expected: &Identity) -> Result<(), SessionError> {
    let (FrameKind::Control, (_, Body::Card(card))) = (kind, decode(body)?) else {
        return Err(SessionError::Protocol("no card where one was asked for".into()));
    };
    if card.agent != expected.agent.as_str() {
        return Err(SessionError::Protocol("another agent answers on the data session".into()));
    }
    if card.boot_epoch != expected.boot_epoch.0 {
        return Err(SessionError::Restarted(BootEpoch(card.boot_epoch)));
    }
    Ok(())
}
