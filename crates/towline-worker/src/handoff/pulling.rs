//! One rank's pull from the ranks of another engine: connections, transfers and fence reads, as the state machine
//! (`towline_wire::handoff`) asks for them.
//!
//! All sources go on at once; each waits only for itself. Cost beyond the bytes: a connection a pair of ranks, once; for
//! each group of parts that became ready a transfer a list (one a source where both sides keep their blocks alike) and
//! a read of 64 bytes. While the owner still computes, its slot is read again with growing pauses (tokio rounds them up
//! to a millisecond). From connecting to releasing the agent keeps the lease alive, whatever is under way: one heartbeat
//! a pair of ranks for all their pulls.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use towline_fabric::{HeldLease, Peer, TransferError, TransferRequest};
use towline_wire::handoff::{Action, Event, Handoff as Machine, HandoffError, Source};
use towline_wire::id::{Generation, LeaseId};
use towline_wire::receipt::{Op, Receipt};
use towline_wire::reshard::ListPair;
use towline_wire::ticket::RankTicket;

use super::landing::Landing;
use super::links::{Links, PullWatch, RankPull, connect};
use super::receipts::{self, Moved};
use super::routes::{Route, routes};

/// A source of a pull under way.
struct Lane<'a> {
    route: Route,
    ticket: &'a RankTicket,
    /// Once it was reached: whom to read from, and what keeps the lease.
    reached: Option<(Peer, HeldLease)>,
    moved: Vec<Moved>,
}

impl Lane<'_> {
    fn lease(&self) -> (LeaseId, Generation) {
        (self.ticket.lease, self.ticket.generation)
    }

    fn release(&mut self) {
        if let Some((peer, held)) = self.reached.take() {
            // First, so that the lease expires should the release be lost. A heartbeat under way may still follow it,
            // and is no news to the owner.
            drop(held);
            // No answer is awaited.
            drop(peer.release(self.ticket.lease, self.ticket.generation));
        }
    }
}

/// A pull under way.
pub(super) struct Pulling<'a> {
    links: &'a Links,
    pull: &'a RankPull<'a>,
    landing: Arc<Landing>,
    started: Instant,
    arrived: Option<Instant>,
    lanes: Vec<Lane<'a>>,
}

/// How a step ended.
enum Done {
    Connected(usize, Peer, HeldLease),
    Moved(usize, Moved),
    Fence(usize, [u8; 24]),
    Failed(HandoffError),
}

type Step<'a> = Pin<Box<dyn Future<Output = Done> + Send + 'a>>;

impl<'a> Pulling<'a> {
    /// Plans it; nothing is dialled yet.
    pub(super) fn new(links: &'a Links, pull: &'a RankPull<'a>) -> Result<Self, HandoffError> {
        let routes = routes(pull)?;
        let invalid = |detail| HandoffError::Invalid { detail };
        let landing = links.landings.take(routes.len());
        let landing = landing.map_err(|error| invalid(format!("no memory to read fences into: {error}")))?;
        let lanes = routes.into_iter().map(|route| {
            let ticket = pull.ticket.ranks.get(route.rank as usize);
            let ticket = ticket.ok_or_else(|| invalid(format!("the ticket has no rank {}", route.rank)))?;
            Ok(Lane { route, ticket, reached: None, moved: Vec::new() })
        });
        let lanes = lanes.collect::<Result<_, HandoffError>>()?;
        Ok(Self { links, pull, landing, started: Instant::now(), arrived: None, lanes })
    }

    /// Does all of it.
    pub(super) async fn run(mut self, watch: &mut dyn PullWatch) -> Result<Vec<Receipt>, HandoffError> {
        let parts = self.pull.ticket.part_layers.count();
        let sources = self.lanes.iter().map(|lane| Source {
            generation: lane.ticket.generation,
            parts: lane.route.parts.keys().copied().collect(),
            parts_ready: lane.ticket.parts_ready,
        });
        let mut machine = Machine::new(sources.collect(), parts, self.pull.deadline);
        let mut steps: FuturesUnordered<Step<'a>> = FuturesUnordered::new();
        loop {
            while let Some(action) = machine.poll_action() {
                if let Some(event) = self.begin(action, &steps, watch) {
                    machine.handle_event(self.started.elapsed(), event);
                }
            }
            while let Some(part) = machine.poll_part() {
                watch.handle_part(part);
            }
            let Some(timer) = machine.next_timer() else { break };
            let event = self.next(&mut steps, timer).await;
            machine.handle_event(self.started.elapsed(), event);
        }
        match machine.outcome() {
            Some(Ok(())) => Ok(self.receipts()),
            Some(Err(error)) => Err(error.clone()),
            // Without a timer there is an outcome.
            None => Err(HandoffError::Cancelled),
        }
    }

    fn left(&self) -> Duration {
        self.pull.deadline.saturating_sub(self.started.elapsed())
    }

    /// Begins what the machine asks for; what needs no waiting is answered at once.
    fn begin(
        &mut self,
        action: Action,
        steps: &FuturesUnordered<Step<'a>>,
        watch: &mut dyn PullWatch,
    ) -> Option<Event> {
        let step = match action {
            Action::Connect { source } => self.connect(source),
            Action::ReadParts { source, parts } => self.read_parts(source, parts),
            Action::ReadFence { source } => self.read_fence(source),
            Action::Digest => return Some(Event::Digested(watch.check())),
            Action::Release { source } => {
                if let Some(lane) = self.lanes.get_mut(source) {
                    lane.release();
                }
                return None;
            }
        };
        match step {
            Ok(step) => steps.push(step),
            Err(error) => return Some(Event::Failed(error)),
        }
        None
    }

    /// What happens next: a step ends, or it is time.
    async fn next(&mut self, steps: &mut FuturesUnordered<Step<'a>>, timer: Duration) -> Event {
        let wait = timer.saturating_sub(self.started.elapsed());
        if steps.is_empty() {
            tokio::time::sleep(wait).await;
            return Event::Tick;
        }
        match tokio::time::timeout(wait, steps.next()).await {
            Ok(Some(done)) => self.take(done),
            Ok(None) | Err(_) => Event::Tick,
        }
    }

    fn take(&mut self, done: Done) -> Event {
        match done {
            Done::Failed(error) => Event::Failed(error),
            Done::Fence(source, slot) => Event::FenceRead { source, slot },
            Done::Connected(source, peer, held) => {
                let Some(lane) = self.lanes.get_mut(source) else { return Event::Tick };
                lane.reached = Some((peer, held));
                Event::Connected { source }
            }
            Done::Moved(source, moved) => {
                self.arrived = Some(Instant::now());
                if let Some(lane) = self.lanes.get_mut(source) {
                    lane.moved.push(moved);
                }
                Event::DataArrived { source }
            }
        }
    }

    fn lane(&mut self, source: usize) -> Result<&mut Lane<'a>, HandoffError> {
        let none = || HandoffError::Invalid { detail: format!("there is no source {source}") };
        self.lanes.get_mut(source).ok_or_else(none)
    }

    /// A source that was reached, and how.
    fn reached(&mut self, source: usize) -> Result<(&mut Lane<'a>, Peer), HandoffError> {
        let lane = self.lane(source)?;
        let peer = lane.reached.as_ref().map(|(peer, _)| peer.clone());
        let peer = peer.ok_or_else(|| HandoffError::Unreachable { detail: "not connected".into() })?;
        Ok((lane, peer))
    }

    fn connect(&mut self, source: usize) -> Result<Step<'a>, HandoffError> {
        let (links, pull, left) = (self.links, self.pull, self.left());
        let ticket = self.lane(source)?.ticket;
        Ok(Box::pin(async move {
            match connect(links, pull, ticket, left).await {
                Ok((peer, held)) => Done::Connected(source, peer, held),
                Err(error) => Done::Failed(error),
            }
        }))
    }

    fn read_parts(&mut self, source: usize, parts: Range<u32>) -> Result<Step<'a>, HandoffError> {
        let (pull, left) = (self.pull, self.left());
        let (lane, peer) = self.reached(source)?;
        let (region, lease) = (lane.ticket.region, lane.lease());
        let request = |pair: &ListPair| TransferRequest {
            op: Op::Read,
            local: Arc::clone(&pull.memory),
            local_blocks: pair.local.clone(),
            remote_region: region,
            remote_blocks: pair.remote.clone(),
            lease: Some(lease),
            deadline: left,
            hold: pull.hold.clone(),
            notify: None,
        };
        let posted = Instant::now();
        let failed = |error| transfer_error(error, pull.deadline);
        let transfers = lane.route.lists(parts).map(|pair| peer.transfer(request(pair)).map_err(failed));
        let transfers = transfers.collect::<Result<Vec<_>, _>>()?;
        Ok(Box::pin(async move {
            match try_join_all(transfers).await {
                Ok(receipts) => Done::Moved(source, Moved { receipts, wall: posted.elapsed() }),
                Err(error) => Done::Failed(failed(error)),
            }
        }))
    }

    fn read_fence(&mut self, source: usize) -> Result<Step<'a>, HandoffError> {
        let (left, landing, deadline) = (self.left(), Arc::clone(&self.landing), self.pull.deadline);
        let (lane, peer) = self.reached(source)?;
        let request = landing.read(source, lane.ticket, left);
        let transfer = peer.transfer(request).map_err(|error| transfer_error(error, deadline))?;
        Ok(Box::pin(async move {
            if let Err(error) = transfer.await {
                return Done::Failed(transfer_error(error, deadline));
            }
            match landing.fence(source) {
                Ok(bytes) => Done::Fence(source, bytes),
                Err(error) => Done::Failed(HandoffError::Invalid { detail: error.to_string() }),
            }
        }))
    }

    fn receipts(&mut self) -> Vec<Receipt> {
        let verify_s = self.arrived.map_or(0.0, |arrived| arrived.elapsed().as_secs_f64());
        let joined = self.lanes.iter_mut().filter_map(|lane| {
            let mut receipt = receipts::join(std::mem::take(&mut lane.moved), lane.route.blocks())?;
            receipt.timings.verify_s = verify_s;
            Some(receipt)
        });
        joined.collect()
    }
}

impl Drop for Pulling<'_> {
    /// A cancelled pull gives the leases back too.
    fn drop(&mut self) {
        self.lanes.iter_mut().for_each(Lane::release);
    }
}

fn transfer_error(error: TransferError, deadline: Duration) -> HandoffError {
    match error {
        TransferError::PeerRestarted { .. } => HandoffError::PeerRestarted,
        TransferError::Stalled { .. } => HandoffError::Stalled { after: deadline },
        TransferError::Expired { .. } => HandoffError::LeaseOver,
        TransferError::Cancelled => HandoffError::Cancelled,
        TransferError::ContractViolation(violation) => {
            HandoffError::ContractViolation { detail: violation.to_string() }
        }
        other => HandoffError::Unreachable { detail: other.to_string() },
    }
}
