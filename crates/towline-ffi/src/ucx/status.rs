//! What UCX says became of something.

use std::ffi::CStr;

use thiserror::Error;

use super::abi::{RawStatus, StatusPtr};
use super::api::StatusString;

const OK: RawStatus = 0;
const IN_PROGRESS: RawStatus = 1;
/// `UCS_ERR_LAST`: what is above it, read as an address, is a status.
const LAST: isize = -100;

/// A call that failed, in UCX's words.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{call}: {text} ({code})")]
pub struct UcxError {
    /// The function.
    pub call: &'static str,
    /// `ucs_status_t`.
    pub code: i8,
    /// What UCX calls it.
    pub text: String,
}

impl UcxError {
    /// Whether the path to the peer is what failed: it is dead, unreachable, or reset (`ucs_status_t` of links and endpoints among them).
    pub fn is_of_peer(&self) -> bool {
        matches!(self.code, -6 | -20 | -24 | -25 | -89..=-40)
    }

    /// Whether it was taken back: its endpoint was closed by force.
    pub fn is_cancelled(&self) -> bool {
        self.code == -16
    }
}

/// Puts statuses in words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words(pub(crate) StatusString);

impl Words {
    /// # Errors
    /// [`UcxError`], unless it is `UCS_OK`.
    pub(crate) fn check(self, call: &'static str, status: RawStatus) -> Result<(), UcxError> {
        if status == OK { Ok(()) } else { Err(self.error(call, status)) }
    }

    pub(crate) fn error(self, call: &'static str, code: RawStatus) -> UcxError {
        // SAFETY: the function takes any number, and answers with a text that stays.
        let text = unsafe { (self.0)(code) };
        let text = if text.is_null() {
            "unknown".into()
        } else {
            // SAFETY: a text of the library's that ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        UcxError { call, code, text }
    }
}

/// How a request began.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// It is over already, and its callback won't be called.
    Done(RawStatus),
    /// Its callback will be called.
    InFlight(StatusPtr),
}

impl Begun {
    /// As `UCS_PTR_IS_PTR` of the header has it.
    pub(crate) fn from_pointer(pointer: StatusPtr) -> Self {
        let address = pointer.addr().cast_signed();
        match i8::try_from(address) {
            Ok(status) if address == 0 || (LAST..0).contains(&address) => Self::Done(status),
            _ => Self::InFlight(pointer),
        }
    }
}

/// Whether a status says that it isn't over.
pub(crate) fn is_in_progress(status: RawStatus) -> bool {
    status == IN_PROGRESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_is_nothing_a_status_or_a_request() {
        let at =
            |address: isize| Begun::from_pointer(std::ptr::without_provenance_mut(address.cast_unsigned()));
        assert_eq!((at(0), at(-25), at(-100)), (Begun::Done(0), Begun::Done(-25), Begun::Done(-100)));
        assert!(matches!(
            (at(-101), at(4096), at(1)),
            (Begun::InFlight(_), Begun::InFlight(_), Begun::InFlight(_))
        ));
    }
}
