//! The words for how an operation ends, as the table and the page have them.

use towline_fabric::{ConnectError, ControlError, RegisterError, TransferError};
use towline_wire::fence::FenceError;

/// The bytes are the owner's, by fence and by digest; or the call was answered.
pub(super) const GOOD: &str = "success";

pub(super) const CONNECT_AUTH: &str = "ConnectError::Auth";
pub(super) const CONNECT_CARD: &str = "ConnectError::Card";
pub(super) const CONNECT_DEADLINE: &str = "ConnectError::Deadline";
pub(super) const CONNECT_NO_TRANSPORT: &str = "ConnectError::NoTransport";
pub(super) const CONNECT_RESTARTED: &str = "ConnectError::PeerRestarted";
pub(super) const CONNECT_UNREACHABLE: &str = "ConnectError::Unreachable";

pub(super) const EXPIRED: &str = "TransferError::Expired";
pub(super) const INVALID: &str = "TransferError::Invalid";
pub(super) const OUT_OF_RANGE: &str = "TransferError::OutOfRange";
pub(super) const STALLED: &str = "TransferError::Stalled";
pub(super) const UNKNOWN_REGION: &str = "TransferError::UnknownRegion";
pub(super) const UNREACHABLE: &str = "TransferError::Unreachable";

pub(super) const FENCE_EXPIRED: &str = "FenceError::Expired";
/// Bytes that are not the owner's passed the fence: never to be seen.
pub(super) const WRONG_BYTES: &str = "wrong bytes behind a valid fence";

pub(super) const CALL_REFUSED: &str = "ControlError::Refused";
pub(super) const CALL_STALLED: &str = "ControlError::Stalled";
pub(super) const CALL_UNREACHABLE: &str = "ControlError::Unreachable";

pub(super) const ALLOCATE: &str = "RegisterError::Allocate";

/// What an owner sees of a reader that is gone.
pub(super) const GONE: &str = "Owner::handle_peer_gone";
pub(super) const NOT_GREETED: &str = "AgentStats::handshakes_refused";

const OTHER: &str = "an error that the table does not know";

pub(super) fn of_connect(error: &ConnectError) -> &'static str {
    eprintln!("connect: {error}");
    match error {
        ConnectError::Auth { .. } => CONNECT_AUTH,
        ConnectError::Card { .. } => CONNECT_CARD,
        ConnectError::Deadline { .. } => CONNECT_DEADLINE,
        ConnectError::NoTransport { .. } => CONNECT_NO_TRANSPORT,
        ConnectError::PeerRestarted { .. } => CONNECT_RESTARTED,
        ConnectError::Unreachable { .. } => CONNECT_UNREACHABLE,
        _ => OTHER,
    }
}

pub(super) fn of_transfer(error: &TransferError) -> &'static str {
    eprintln!("transfer: {error}");
    match error {
        TransferError::Expired { .. } => EXPIRED,
        TransferError::Invalid(_) => INVALID,
        TransferError::OutOfRange { .. } => OUT_OF_RANGE,
        TransferError::Stalled { .. } => STALLED,
        TransferError::UnknownRegion { .. } => UNKNOWN_REGION,
        TransferError::Unreachable { .. } => UNREACHABLE,
        _ => OTHER,
    }
}

pub(super) fn of_call(outcome: Result<(), ControlError>) -> &'static str {
    match outcome {
        Ok(()) => GOOD,
        Err(ControlError::Refused { .. }) => CALL_REFUSED,
        Err(ControlError::Stalled { .. }) => CALL_STALLED,
        Err(ControlError::Unreachable { .. }) => CALL_UNREACHABLE,
        Err(_) => OTHER,
    }
}

pub(super) fn of_fence(error: FenceError) -> &'static str {
    match error {
        FenceError::Expired { .. } => FENCE_EXPIRED,
        _ => OTHER,
    }
}

pub(super) fn of_registration(error: &RegisterError) -> &'static str {
    match error {
        RegisterError::Allocate { .. } => ALLOCATE,
        _ => OTHER,
    }
}
