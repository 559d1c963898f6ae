//! How much work is let in: requests in flight, and the bytes of their bodies. Who doesn't fit is told at once.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Limits;
use crate::error::AnswerError;

/// The unit in which bodies are counted; a semaphore's permits are `u32`.
const KIB: usize = 1 << 10;

/// The gate.
#[derive(Debug)]
pub(crate) struct Admission {
    requests: Arc<Semaphore>,
    body_kib: Arc<Semaphore>,
}

/// A request's place inside; dropping it makes room.
#[derive(Debug)]
pub(crate) struct Admitted {
    _request: OwnedSemaphorePermit,
    body: OwnedSemaphorePermit,
}

impl Admitted {
    /// The body has arrived, and is no longer than this: gives back the room it doesn't need.
    pub(crate) fn shrink(&mut self, body_bytes: usize) {
        let spare = self.body.num_permits().saturating_sub(body_bytes.div_ceil(KIB));
        drop(self.body.split(spare));
    }
}

impl Admission {
    pub(crate) fn new(limits: &Limits) -> Self {
        let of = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        Self { requests: of(limits.requests_in_flight_max), body_kib: of(limits.bodies_bytes_max / KIB) }
    }

    /// Lets in a request whose body is at most `body_bytes` long.
    pub(crate) fn admit(&self, body_bytes: usize) -> Result<Admitted, AnswerError> {
        let full = |_| AnswerError::Overloaded;
        let kib = u32::try_from(body_bytes.div_ceil(KIB)).map_err(|_| AnswerError::TooLarge)?;
        let request = Arc::clone(&self.requests).try_acquire_owned().map_err(full)?;
        let body = Arc::clone(&self.body_kib).try_acquire_many_owned(kib).map_err(full)?;
        Ok(Admitted { _request: request, body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_bytes_are_both_bounded() {
        let limits = Limits { requests_in_flight_max: 2, bodies_bytes_max: 4096, ..Limits::default() };
        let gate = Admission::new(&limits);
        let first = gate.admit(3000).unwrap();
        assert!(gate.admit(2000).is_err());
        let second = gate.admit(1000).unwrap();
        assert!(gate.admit(0).is_err());
        drop((first, second));
        let mut whole = gate.admit(4096).unwrap();
        assert!(gate.admit(1).is_err());
        whole.shrink(100);
        assert!(gate.admit(3072).is_ok());
    }
}
