//! Readers and the network: what the handoff asks for is done here, late, twice or not at all.
//!
//! Control messages travel in sealed frames over TCP, so they are lost with the connection and never doubled. Reads
//! may be executed twice by a network that repeats a lost answer (RDMA's reliable transport does that), at any time
//! before they complete, in any order.

use std::ops::Range;

use towline_wire::handoff::{Action, Event, Handoff, HandoffError, Source};
use towline_wire::id::BootEpoch;

use super::invariant::Violation;
use super::reader::{FenceSeen, Target, Ticket};
use super::scenario::{BLOCK_BYTES, Mutant, SLICE_BYTES, SLICES, Wire};
use super::world::{Ask, Happening, News, World, moment};

/// How long a dialler waits before a missing answer is an error, in µs.
const DIAL_TIMEOUT_US: u64 = 10_000;
/// How long until a lost answer is asked for again, in µs.
const REPEAT_US: u64 = 4_000;

fn unreachable(detail: &str) -> News {
    News::Event(Event::Failed(HandoffError::Unreachable { detail: detail.into() }))
}

impl World<'_> {
    fn is_cut(&self, reader: usize) -> bool {
        self.readers[reader].cut_until > self.now
    }

    fn loses(&mut self) -> bool {
        self.random.chance(self.scenario.loss_permille)
    }

    fn latency(&mut self) -> u64 {
        let base = self.scenario.latency_us;
        let tail =
            if self.random.chance(self.scenario.tail_permille) { self.random.within(0, 30_000) } else { 0 };
        self.random.within(base / 2, base * 2) + tail
    }

    fn tell(&mut self, reader: usize, news: News) {
        let latency = self.latency();
        self.after(latency, Happening::Reader(reader, news));
    }

    pub(super) fn handle_news(&mut self, reader: usize, news: News) -> Result<(), Violation> {
        match news {
            News::Ticket(ticket) => self.begin(reader, ticket),
            News::Greeted(incarnation, epoch) => {
                let expected = self.readers[reader].ticket.as_ref().map(|ticket| ticket.epoch);
                let known = expected == Some(epoch) || self.mutant == Mutant::ReaderForgetsEpoch;
                let event = if known {
                    Event::Connected { source: 0 }
                } else {
                    Event::Failed(HandoffError::PeerRestarted)
                };
                self.readers[reader].session = Some(incarnation);
                self.feed(reader, event)
            }
            News::Landed(target) => self.landed(reader, target),
            News::Event(event) => self.feed(reader, event),
            News::HeartbeatDue => {
                self.beat(reader);
                Ok(())
            }
        }
    }

    fn begin(&mut self, reader: usize, ticket: Ticket) -> Result<(), Violation> {
        let deadline = self.now + self.scenario.deadline_us;
        let state = &mut self.readers[reader];
        if state.handoff.is_some() {
            return Ok(());
        }
        state.buffer = vec![0; ticket.blocks.len() * BLOCK_BYTES];
        let blind = self.mutant == Mutant::ReaderIgnoresCount;
        let source = Source {
            generation: ticket.grant.generation,
            parts: (0..ticket.parts).collect(),
            parts_ready: if blind { ticket.parts } else { ticket.parts_ready },
        };
        state.handoff = Some(Handoff::new(vec![source], ticket.parts, moment(deadline)));
        state.ticket = Some(ticket);
        self.at(deadline, Happening::Reader(reader, News::Event(Event::Tick)));
        self.pump(reader)
    }

    /// Gives the machine an event and does what it then asks for.
    fn feed(&mut self, reader: usize, event: Event) -> Result<(), Violation> {
        let now = moment(self.now);
        let state = &mut self.readers[reader];
        let Some(handoff) = &mut state.handoff else { return Ok(()) };
        state.connected |= matches!(event, Event::Connected { .. })
            && handoff.outcome().is_none()
            && now < handoff.deadline();
        handoff.handle_event(now, event);
        self.pump(reader)
    }

    fn pump(&mut self, reader: usize) -> Result<(), Violation> {
        while let Some(action) = self.readers[reader].handoff.as_mut().and_then(|h| h.poll_action()) {
            match action {
                Action::Connect { .. } => self.connect(reader),
                Action::ReadParts { parts, .. } => self.read_parts(reader, parts),
                Action::ReadFence { .. } if self.readers[reader].fenced_early => {
                    self.readers[reader].fenced_early = false;
                    let slot = self.readers[reader].fence.expect("the mutant has read it").bytes;
                    let early = Event::FenceRead { source: 0, slot };
                    self.after(0, Happening::Reader(reader, News::Event(early)));
                }
                Action::ReadFence { .. } => self.read(reader, Target::Fence),
                Action::Digest => {
                    let state = &self.readers[reader];
                    let found = state.digest(state.ticket.as_ref().expect("it began with one"));
                    self.soon(100, Happening::Reader(reader, News::Event(Event::Digested(found))));
                }
                Action::Release { .. } => {
                    self.readers[reader].release_asked = true;
                    self.send(reader, Ask::Release);
                }
            }
        }
        while let Some(part) = self.readers[reader].handoff.as_mut().and_then(Handoff::poll_part) {
            self.check_part(reader, part)?;
        }
        self.arm(reader);
        self.check_outcome(reader)
    }

    /// Comes back when the slot is to be read again; the deadline has a tick of its own.
    fn arm(&mut self, reader: usize) {
        let Some(handoff) = &self.readers[reader].handoff else { return };
        let retry = handoff.next_timer().filter(|due| *due < handoff.deadline());
        let due = retry.map_or(0, |due| u64::try_from(due.as_micros()).unwrap());
        if due > self.readers[reader].tick_at {
            self.readers[reader].tick_at = due;
            self.at(due, Happening::Reader(reader, News::Event(Event::Tick)));
        }
    }

    fn connect(&mut self, reader: usize) {
        if self.is_cut(reader) || self.loses() {
            // No answer; half of the time the kernel gives up before the deadline does.
            if self.random.chance(500) {
                let late = unreachable("no answer");
                self.after(DIAL_TIMEOUT_US, Happening::Reader(reader, late));
            }
            return;
        }
        let latency = self.latency();
        self.after(latency, Happening::Dial(reader));
    }

    pub(super) fn dial(&mut self, reader: usize) {
        let current = self.current();
        let owner = &self.owners[current];
        if !owner.alive {
            self.tell(reader, unreachable("connection refused"));
        } else if owner.paused_until > self.now {
            self.at(owner.paused_until, Happening::Dial(reader));
        } else {
            let epoch: BootEpoch = owner.epoch;
            self.tell(reader, News::Greeted(current, epoch));
            if self.scenario.heartbeats {
                let beat = self.scenario.ttl_us / 3;
                self.after(beat, Happening::Reader(reader, News::HeartbeatDue));
            }
        }
    }

    fn read_parts(&mut self, reader: usize, parts: Range<u32>) {
        if self.mutant == Mutant::ReaderFencesFirst {
            self.readers[reader].postponed = Some(parts);
            return self.read(reader, Target::Fence);
        }
        self.read_slices(reader, &parts);
    }

    fn read_slices(&mut self, reader: usize, parts: &Range<u32>) {
        let slices = self.readers[reader].slices(parts);
        self.readers[reader].slices_left = slices.len();
        slices.into_iter().for_each(|slice| self.read(reader, Target::Slice(slice)));
    }

    /// Posts one read; it happens at the owner some time later.
    fn read(&mut self, reader: usize, target: Target) {
        let latency = self.latency();
        if self.scenario.wire == Wire::Served {
            return self.send(reader, Ask::Read(target));
        }
        self.after(latency, Happening::Copy(reader, target));
    }

    /// Sends over the session's connection, if there is one.
    fn send(&mut self, reader: usize, ask: Ask) {
        let Some(incarnation) = self.readers[reader].session else { return };
        if self.is_cut(reader) || (self.loses() && !matches!(ask, Ask::Read(_))) {
            return;
        }
        let latency = self.latency();
        self.after(latency, Happening::Ask(reader, incarnation, ask));
    }

    fn beat(&mut self, reader: usize) {
        let state = &self.readers[reader];
        let (Some(ticket), None) = (&state.ticket, state.outcome()) else { return };
        let lease = ticket.grant.lease;
        self.send(reader, Ask::Heartbeat(lease));
        let beat = self.scenario.ttl_us / 3;
        self.after(beat, Happening::Reader(reader, News::HeartbeatDue));
    }

    /// A message reaches the owner's process.
    pub(super) fn handle_ask(
        &mut self,
        reader: usize,
        incarnation: usize,
        ask: Ask,
    ) -> Result<(), Violation> {
        let now = self.now;
        let owner = &mut self.owners[incarnation];
        if !owner.alive {
            if matches!(ask, Ask::Read(_)) {
                self.tell(reader, unreachable("connection reset"));
            }
            return Ok(());
        }
        if let Some(until) = owner.busy_until(now) {
            self.at(until, Happening::Ask(reader, incarnation, ask));
            return Ok(());
        }
        let state = &self.readers[reader];
        let Some(ticket) = &state.ticket else { return Ok(()) };
        match ask {
            // A lease that is over is no news here: the reader learns it from the fence.
            Ask::Heartbeat(lease) => {
                _ = owner.table.extend(moment(now), lease, &state.name, moment(self.scenario.ttl_us));
            }
            Ask::Release => {
                let (lease, generation) = (ticket.grant.lease, ticket.grant.generation);
                if let Ok(Some(over)) = owner.table.release(lease, generation, &state.name) {
                    return self.end(over);
                }
            }
            Ask::Read(target) => {
                if let Target::Slice(slice) = target {
                    let block = ticket.blocks[slice * SLICE_BYTES / BLOCK_BYTES];
                    let held =
                        owner.table.check(ticket.grant.lease, ticket.grant.generation, [block].into_iter());
                    if held.is_err() {
                        self.tell(reader, News::Event(Event::Failed(HandoffError::LeaseOver)));
                        return Ok(());
                    }
                }
                self.soon(300, Happening::Copy(reader, target));
            }
        }
        Ok(())
    }

    /// The owner's memory is read: this is the moment that counts.
    pub(super) fn copy(&mut self, reader: usize, target: Target) {
        let now = self.now;
        let Some(incarnation) = self.readers[reader].session else { return };
        let wire = self.scenario.wire;
        if wire != Wire::Mapped && !self.owners[incarnation].alive {
            return self.tell(reader, unreachable("the owner is gone"));
        }
        if wire != Wire::Mapped && self.is_cut(reader) {
            if self.random.chance(500) {
                self.tell(reader, unreachable("the link is down"));
            }
            return;
        }
        self.take_bytes(reader, incarnation, target);
        if wire == Wire::Remote && self.loses() {
            // The answer is lost and asked for again: the read happens once more.
            return self.soon(REPEAT_US, Happening::Copy(reader, target));
        }
        if target == Target::Fence {
            self.readers[reader].fence.as_mut().expect("just taken").at_us = now;
        }
        self.tell(reader, News::Landed(target));
    }

    fn take_bytes(&mut self, reader: usize, incarnation: usize, target: Target) {
        let (owner, state) = (&self.owners[incarnation], &mut self.readers[reader]);
        let Some(ticket) = state.ticket.clone() else { return };
        match target {
            Target::Slice(slice) => {
                let (block, half) = (slice / SLICES, slice % SLICES);
                let mut bytes = owner.slice(ticket.blocks[block], half).to_vec();
                if self.scenario.corrupts && self.random.chance(20) {
                    bytes[self.random.index(SLICE_BYTES)] ^= 1 << self.random.index(8);
                }
                state.land(slice, &bytes);
                state.data_us = self.now;
            }
            Target::Fence => {
                let held = owner.table.check(ticket.grant.lease, ticket.grant.generation, [].into_iter());
                let bytes = owner.slot(ticket.grant.slot);
                state.fence = Some(FenceSeen { bytes, at_us: self.now, lease_held: held.is_ok() });
            }
        }
    }

    /// A read has completed at the reader.
    fn landed(&mut self, reader: usize, target: Target) -> Result<(), Violation> {
        let state = &mut self.readers[reader];
        match target {
            Target::Slice(_) => {
                state.slices_left -= 1;
                if state.slices_left == 0 {
                    self.feed(reader, Event::DataArrived { source: 0 })
                } else {
                    Ok(())
                }
            }
            Target::Fence => {
                if let Some(parts) = state.postponed.take() {
                    state.fenced_early = true;
                    self.read_slices(reader, &parts);
                    return Ok(());
                }
                let slot = state.fence.expect("it was taken").bytes;
                self.feed(reader, Event::FenceRead { source: 0, slot })
            }
        }
    }
}
