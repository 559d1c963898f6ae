//! One source of a handoff: what it has, how much of that is ready, arrived and fenced.

use std::ops::Range;
use std::time::Duration;

use super::{FENCE_READS_MAX, HandoffError, RETRY_MAX, RETRY_MIN};
use crate::fence::{Fence, FenceError};
use crate::id::Generation;
use crate::lease::Now;

/// A rank that is read, as its ticket describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// What its fence slot must show.
    pub generation: Generation,
    /// The parts of which this reader needs something from it, ascending. With none, it is only told of the release.
    pub parts: Vec<u32>,
    /// How many of the handoff's parts were ready when the ticket was sealed.
    pub parts_ready: u32,
}

/// What follows for a source.
pub(super) enum Next {
    Nothing,
    ReadFence,
    ReadParts(Range<u32>),
    Done,
    Fail(HandoffError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    /// The slot is read to see whether more is ready.
    Probing {
        torn: u32,
        retry: Duration,
    },
    /// It was not; the slot is read again then.
    Waiting {
        until: Now,
        retry: Duration,
    },
    /// The first `to` of its parts will have arrived.
    Reading {
        to: usize,
    },
    /// They have; the slot is read to see whether they are good.
    Fencing {
        to: usize,
        torn: u32,
    },
    Done,
}

#[derive(Debug)]
pub(super) struct Lane {
    source: Source,
    /// As the slot, or the ticket, last showed.
    ready: u64,
    /// Of its parts, how many arrived and were fenced.
    good: usize,
    phase: Phase,
}

impl Lane {
    pub(super) fn new(source: Source) -> Self {
        Self { ready: u64::from(source.parts_ready), source, good: 0, phase: Phase::Connecting }
    }

    pub(super) fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    pub(super) fn was_reached(&self) -> bool {
        self.phase != Phase::Connecting
    }

    /// Its first part that has not arrived.
    pub(super) fn missing(&self) -> Option<u32> {
        self.source.parts.get(self.good).copied()
    }

    /// When its slot is to be read again.
    pub(super) fn retry_at(&self) -> Option<Now> {
        match self.phase {
            Phase::Waiting { until, .. } => Some(until),
            _ => None,
        }
    }

    pub(super) fn handle_connected(&mut self) -> Next {
        if self.phase == Phase::Connecting { self.advance() } else { Next::Nothing }
    }

    pub(super) fn handle_time(&mut self, now: Now) -> Next {
        match self.phase {
            Phase::Waiting { until, retry } if until <= now => {
                self.phase = Phase::Probing { torn: 0, retry };
                Next::ReadFence
            }
            _ => Next::Nothing,
        }
    }

    pub(super) fn handle_data(&mut self) -> Next {
        let Phase::Reading { to } = self.phase else { return Next::Nothing };
        self.phase = Phase::Fencing { to, torn: 0 };
        Next::ReadFence
    }

    pub(super) fn handle_fence(&mut self, now: Now, slot: &[u8; 24]) -> Next {
        let (torn, needed) = match self.phase {
            Phase::Probing { torn, .. } => (torn, 0),
            Phase::Fencing { torn, to } => (torn, self.last_of(to)),
            _ => return Next::Nothing,
        };
        let generation = self.source.generation;
        match Fence::decode(slot).and_then(|fence| fence.check(generation, needed).map(|()| fence)) {
            Ok(fence) => self.handle_good_fence(now, fence.parts_ready),
            Err(FenceError::Torn) if torn + 1 < FENCE_READS_MAX => {
                self.phase = match self.phase {
                    Phase::Probing { retry, .. } => Phase::Probing { torn: torn + 1, retry },
                    Phase::Fencing { to, .. } => Phase::Fencing { to, torn: torn + 1 },
                    other => other,
                };
                Next::ReadFence
            }
            Err(detail) => Next::Fail(HandoffError::Expired { detail }),
        }
    }

    /// Its generation is the ticket's.
    fn handle_good_fence(&mut self, now: Now, parts_ready: u64) -> Next {
        let news = parts_ready > self.ready;
        self.ready = self.ready.max(parts_ready);
        match self.phase {
            Phase::Fencing { to, .. } => {
                self.good = to;
                self.advance()
            }
            Phase::Probing { .. } if self.readable() > self.good => self.advance(),
            Phase::Probing { retry, .. } => {
                let retry = if news { RETRY_MIN } else { retry };
                self.phase =
                    Phase::Waiting { until: now.saturating_add(retry), retry: (retry * 2).min(RETRY_MAX) };
                Next::Nothing
            }
            _ => Next::Nothing,
        }
    }

    fn advance(&mut self) -> Next {
        let Some(first) = self.missing() else {
            self.phase = Phase::Done;
            return Next::Done;
        };
        let to = self.readable();
        if to > self.good {
            self.phase = Phase::Reading { to };
            let end = u32::try_from(self.last_of(to)).unwrap_or(u32::MAX);
            return Next::ReadParts(first..end);
        }
        self.phase = Phase::Probing { torn: 0, retry: RETRY_MIN };
        Next::ReadFence
    }

    /// Of its parts, how many are ready.
    fn readable(&self) -> usize {
        self.source.parts.partition_point(|part| u64::from(*part) < self.ready)
    }

    /// What the slot must count when the first `to` of its parts are ready.
    fn last_of(&self, to: usize) -> u64 {
        to.checked_sub(1).and_then(|last| self.source.parts.get(last)).map_or(0, |part| u64::from(*part) + 1)
    }
}
