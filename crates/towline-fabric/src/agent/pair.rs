//! A pair under its contract: judged when it connects, watched while it moves.
//!
//! A pair that becomes too slow is treated as its contract says. `refuse`: it goes down, what was under way and what is
//! posted later fails with the violation, and for [`REFUSED_FOR`] it isn't connected to again under a contract that asks
//! for more than was seen. `alarm`: it goes on, with a log line, a count, and a mark in each receipt until it is fast
//! enough again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use towline_wire::contract::{Contract, ContractViolation, OnViolation, Watch};
use towline_wire::id::AgentName;
use towline_wire::receipt::{Op, Rail};

use super::book::{Book, Totals};
use super::estimate::Estimate;

/// How long a pair that was too slow stays refused: long enough to use another, short enough for what passes by itself.
const REFUSED_FOR: Duration = Duration::from_secs(30);
/// Most agents remembered; the one that is free soonest makes room.
const REFUSED_MAX: usize = 1024;

/// A pair's contract and book.
#[derive(Debug)]
pub(super) struct Pair {
    contract: Contract,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    book: Book,
    estimate: Estimate,
    watch: Watch,
    /// Of the path's kind: it stays.
    kind: Option<ContractViolation>,
    /// Of its rate: it comes and goes.
    rate: Option<ContractViolation>,
}

impl Pair {
    /// Connected, over a path that breaks the contract as `kind` says, if it does.
    pub(super) fn new(contract: Contract, kind: Option<ContractViolation>) -> Self {
        let (book, estimate, watch) = (Book::default(), Estimate::default(), Watch::default());
        let state = State { book, estimate, watch, kind, rate: None };
        Self { contract, state: Mutex::new(state) }
    }

    /// Connected again, over a path that breaks the contract as `kind` says, if it does.
    pub(super) fn handle_reconnect(&self, kind: Option<ContractViolation>) {
        self.lock().kind = kind;
    }

    /// Whether a transfer is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.lock().book.is_busy()
    }

    /// What it has moved.
    pub(super) fn totals(&self) -> Totals {
        self.lock().book.totals().clone()
    }

    /// How long a transfer of `bytes` will take, once enough has moved to tell.
    pub(super) fn estimate(&self, bytes: u64) -> Option<Duration> {
        self.lock().estimate.of(bytes)
    }

    /// How it breaks its contract now, if it does.
    pub(super) fn violation(&self) -> Option<ContractViolation> {
        let state = self.lock();
        state.kind.clone().or_else(|| state.rate.clone())
    }

    /// Whether a violation ends the pair.
    pub(super) fn refuses(&self) -> bool {
        self.contract.on_violation == OnViolation::Refuse
    }

    /// A transfer begins.
    pub(super) fn handle_start(&self, now: Instant) {
        self.lock().book.handle_start(now);
    }

    /// A transfer ended, well if there are rails. Gives the violation that begins with it.
    pub(super) fn handle_end(
        &self,
        now: Instant,
        op: Op,
        rails: Option<&[Rail]>,
    ) -> Option<ContractViolation> {
        let mut state = self.lock();
        let stretch = state.book.handle_end(now, op, rails)?;
        state.estimate.observe(&stretch);
        let was = state.rate.take();
        state.rate = state.watch.observe(&self.contract, stretch.bytes, stretch.seconds).err();
        state.rate.clone().filter(|_| was.is_none())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Agents whose pair was refused for its rate, with what was seen.
#[derive(Debug, Default)]
pub(crate) struct Refused(Mutex<HashMap<AgentName, (Instant, ContractViolation)>>);

impl Refused {
    /// Remembers a violation; one of the path's kind shows again at each connect and needs no memory.
    pub(super) fn remember(&self, agent: &AgentName, violation: &ContractViolation, now: Instant) {
        if !matches!(violation, ContractViolation::Rate { .. }) {
            return;
        }
        let mut refused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        refused.retain(|_, (until, _)| *until > now);
        if refused.len() >= REFUSED_MAX
            && let Some(soonest) =
                refused.iter().min_by_key(|(_, (until, _))| *until).map(|(agent, _)| agent.clone())
        {
            refused.remove(&soonest);
        }
        refused.insert(agent.clone(), (now + REFUSED_FOR, violation.clone()));
    }

    /// Why a pair with `agent` is not to be used under `contract` now.
    pub(super) fn check(
        &self,
        agent: &AgentName,
        contract: &Contract,
        now: Instant,
    ) -> Result<(), ContractViolation> {
        let refused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match refused.get(agent) {
            Some((until, violation @ ContractViolation::Rate { found, .. }))
                if *until > now
                    && contract.min_gb_per_s > *found
                    && contract.on_violation == OnViolation::Refuse =>
            {
                Err(violation.clone())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(index: usize) -> AgentName {
        AgentName::new(format!("agent-{index}")).unwrap()
    }

    fn slow(found: f64) -> ContractViolation {
        ContractViolation::Rate { required: 2.0, found, windows: 3 }
    }

    fn asks(min_gb_per_s: f64) -> Contract {
        Contract { min_gb_per_s, ..Contract::default() }
    }

    #[test]
    fn a_violation_begins_once_and_ends_with_a_fast_stretch() {
        let pair = Pair::new(Contract { on_violation: OnViolation::Alarm, ..asks(1.0) }, None);
        let start = Instant::now();
        let mut at = start;
        let mut moves = |milliseconds| {
            pair.handle_start(at);
            at += Duration::from_millis(milliseconds);
            pair.handle_end(at, Op::Read, Some(&[Rail { name: "r".into(), bytes: 10_000_000 }]))
        };
        assert_eq!((moves(100), moves(100)), (None, None));
        assert!(moves(100).is_some() && pair.violation().is_some());
        assert!(moves(100).is_none() && pair.violation().is_some(), "it goes on and is not new");
        assert!(moves(5).is_none() && pair.violation().is_none());
    }

    #[test]
    fn a_refused_pair_may_come_back_later_or_for_less() {
        let (refused, now) = (Refused::default(), Instant::now());
        refused.remember(&agent(1), &slow(0.5), now);
        assert_eq!(refused.check(&agent(1), &asks(2.0), now), Err(slow(0.5)));
        assert!(refused.check(&agent(2), &asks(2.0), now).is_ok());
        assert!(refused.check(&agent(1), &asks(0.4), now).is_ok());
        let alarm = Contract { on_violation: OnViolation::Alarm, ..asks(2.0) };
        assert!(refused.check(&agent(1), &alarm, now).is_ok());
        assert!(refused.check(&agent(1), &asks(2.0), now + REFUSED_FOR).is_ok());
    }

    #[test]
    fn the_memory_is_bounded() {
        let (refused, now) = (Refused::default(), Instant::now());
        for index in 0..=REFUSED_MAX {
            let later = now + Duration::from_nanos(u64::try_from(index).unwrap());
            refused.remember(&agent(index), &slow(0.5), later);
        }
        assert!(refused.check(&agent(0), &asks(2.0), now).is_ok(), "the oldest made room");
        assert!(refused.check(&agent(REFUSED_MAX), &asks(2.0), now).is_err());
    }
}
