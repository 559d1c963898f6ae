//! What the owner's process does by itself: prefill and lend, store words one by one, fence, free, reuse, expire.

use towline_wire::digest::{DigestMode, Digests, block_digest};
use towline_wire::lease::{Grant, Readers, Revocation, Terms};

use super::invariant::Violation;
use super::owner::{Lent, Store, Stored};
use super::reader::Ticket;
use super::scenario::{Lending, Mutant, QUIET_US, content};
use super::world::{Happening, News, SWEEP_LATE_US, Work, World, moment};

impl World<'_> {
    /// What the living owner does.
    pub(super) fn work(&mut self, work: Work) -> Result<(), Violation> {
        match work {
            Work::Prefill(request) => self.prefill(request),
            Work::Store(store, step) => return self.store(store, step),
            Work::Compute(lent, part) => self.compute(lent, part),
            Work::Count(grant, ready) => self.count(&grant, ready),
            Work::Sweep => return self.sweep(),
            Work::Scribble => self.scribble(),
            Work::ScribbleOver(blocks) => {
                self.free(&blocks)?;
                if self.now < QUIET_US && self.random.chance(300) {
                    self.do_soon(2_000, Work::Scribble);
                }
            }
        }
        Ok(())
    }

    fn do_soon(&mut self, us: u64, work: Work) {
        let current = self.current();
        self.soon(us, Happening::Owner(current, work));
    }

    fn prefill(&mut self, request: usize) {
        let (now, ttl) = (moment(self.now), moment(self.scenario.ttl_us));
        let (count, readers, lending) = {
            let asked = &self.scenario.requests[request];
            (asked.blocks, asked.readers, asked.lending)
        };
        let (_, parts_ready) = lending.parts();
        let current = self.current();
        let owner = &mut self.owners[current];
        if owner.table.free() == 0 || owner.free_blocks() < count {
            if self.now < QUIET_US {
                self.do_soon(3_000, Work::Prefill(request));
            }
            return;
        }
        // What is lent before it is computed holds what was there before.
        self.foreign += 1;
        let written = if lending == Lending::Whole { request as u64 } else { self.foreign };
        let Some(blocks) = owner.take(count, written) else { return };
        let terms = Terms { blocks: blocks.clone(), readers: Readers::First(readers), parts_ready, ttl };
        let grant = owner.table.grant(now, terms).expect("a slot is free");
        if !std::mem::replace(&mut owner.sweep_due, true) {
            self.do_soon(SWEEP_LATE_US, Work::Sweep);
        }
        self.owners[current].locked = self.mutant != Mutant::OwnerShowsUnlocked;
        let lent = Lent { grant, request, blocks };
        self.begin_store(Store::Show { lent, parts_ready });
    }

    /// Computes a part and has it counted; then the next.
    fn compute(&mut self, lent: Lent, part: u32) {
        let (grant, ready) = (lent.grant, part + 1);
        let current = self.current();
        self.owners[current].compute(&lent, part);
        let ahead = u32::from(self.mutant == Mutant::OwnerCountsFirst);
        self.do_soon(self.scenario.store_gap_us, Work::Count(grant, ready + ahead));
        if ready < Lending::Early.parts().0 {
            self.do_soon(self.scenario.compute_us, Work::Compute(lent, ready));
        }
    }

    fn count(&mut self, grant: &Grant, ready: u32) {
        let (current, now, ttl) = (self.current(), moment(self.now), moment(self.scenario.ttl_us));
        let owner = &mut self.owners[current];
        if self.mutant == Mutant::OwnerCountsUnlocked {
            return owner.count_blindly(grant, ready);
        }
        owner.count(grant, ready);
        // Whoever computes for a lease keeps it, while it lasts.
        _ = owner.table.keep(now, grant.lease, ttl);
    }

    fn begin_store(&mut self, store: Store) {
        self.do_soon(self.scenario.store_gap_us, Work::Store(store, 0));
    }

    fn store(&mut self, store: Store, step: usize) -> Result<(), Violation> {
        let current = self.current();
        match self.owners[current].store(store, step) {
            Stored::More(store) => self.do_soon(self.scenario.store_gap_us, Work::Store(store, step + 1)),
            Stored::Fenced(blocks) => return self.reuse(&blocks),
            Stored::Shown(lent) => {
                let owner = &mut self.owners[current];
                (owner.locked, owner.unlocked_us) = (false, self.now);
                let epoch = owner.epoch;
                let Lent { grant, request, blocks } = lent.clone();
                let lending = self.scenario.requests[request].lending;
                if lending == Lending::Early {
                    if self.mutant == Mutant::OwnerCountsFirst {
                        self.count(&grant, 1);
                    }
                    self.do_soon(self.scenario.compute_us, Work::Compute(lent, 0));
                }
                let mode = if lending == Lending::Early { DigestMode::Off } else { self.scenario.digests };
                let digests =
                    Digests::of(mode, blocks.len(), |at| block_digest(&content(request as u64, at)));
                let (parts, parts_ready) = lending.parts();
                let ticket = Ticket { epoch, grant, blocks, digests, parts, parts_ready };
                for reader in 0..self.readers.len() {
                    let waits =
                        self.readers[reader].request == request && self.readers[reader].ticket.is_none();
                    // Through the router, which may be slow or die.
                    if waits && !self.random.chance(30) {
                        let delay = if self.random.chance(100) { 50_000 } else { 3_000 };
                        self.soon(delay, Happening::Reader(reader, News::Ticket(ticket.clone())));
                    }
                }
            }
            Stored::Nothing => {}
        }
        Ok(())
    }

    /// A lease is over: fence, then free. The mutant does it the other way round.
    pub(super) fn end(&mut self, over: Revocation) -> Result<(), Violation> {
        if self.mutant != Mutant::OwnerFreesFirst {
            self.begin_store(Store::Fence(over));
            return Ok(());
        }
        let (slot, generation) = (over.slot, over.generation);
        let blocks = over.fenced(|_, _| ());
        self.reuse(&blocks)?;
        self.begin_store(Store::Late { slot, generation });
        Ok(())
    }

    fn sweep(&mut self) -> Result<(), Violation> {
        let (current, now) = (self.current(), moment(self.now));
        while let Some(over) = self.owners[current].table.poll_expired(now) {
            self.end(over)?;
        }
        match self.owners[current].table.next_expiry() {
            None => self.owners[current].sweep_due = false,
            Some(at) => {
                let late = self.random.within(0, SWEEP_LATE_US);
                let at = u64::try_from(at.as_micros()).unwrap() + late;
                self.at(at, Happening::Owner(current, Work::Sweep));
            }
        }
        Ok(())
    }

    fn free(&mut self, blocks: &[u32]) -> Result<(), Violation> {
        let current = self.current();
        self.owners[current].give_back(blocks).map_err(Violation::Pool)
    }

    /// Freed blocks go to other work, often at once.
    fn reuse(&mut self, blocks: &[u32]) -> Result<(), Violation> {
        self.free(blocks)?;
        match self.random.within(0, 3) {
            0 => {}
            1 => self.do_soon(2_000, Work::Scribble),
            _ => self.scribble(),
        }
        Ok(())
    }

    fn scribble(&mut self) {
        let current = self.current();
        let free = self.owners[current].free_blocks();
        if free == 0 {
            return;
        }
        let count = self.random.index(free) + 1;
        self.foreign += 1;
        if let Some(blocks) = self.owners[current].take(count, self.foreign) {
            self.do_soon(6_000, Work::ScribbleOver(blocks));
        }
    }
}
