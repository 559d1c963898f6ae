//! The world: a queue of happenings in virtual time, the owner's incarnations, the readers, and faults.
//!
//! One thread, one queue, one generator: a seed gives one history. What the owner does is in `work.rs`, what readers and
//! the network do in `wire.rs`; what must hold after every step is in `invariant.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use towline_wire::id::{BootEpoch, LeaseId};
use towline_wire::lease::{Grant, Now};

use super::invariant::{Tally, Violation};
use super::owner::{Lent, Owner, Store};
use super::reader::{Reader, Target, Ticket};
use super::scenario::{Fault, Mutant, QUIET_US, Scenario};
use crate::random::Random;

/// How much later than its due time the owner's expiry thread runs, in µs, when it isn't stopped.
pub(super) const SWEEP_LATE_US: u64 = 2_000;
/// Work that is nobody's request has numbers from here on.
const FOREIGN: u64 = 1 << 32;

pub(super) fn moment(us: u64) -> Now {
    Duration::from_micros(us)
}

/// Faults of one kind that overlap last until the later end.
fn later(until: &mut u64, end: u64) {
    *until = (*until).max(end);
}

/// What a message to the owner asks.
#[derive(Debug)]
pub(super) enum Ask {
    Heartbeat(LeaseId),
    Release,
    /// A read that the owner's process serves: the lease is checked now, the bytes are sent a little later.
    Read(Target),
}

/// What the owner's process does by itself.
#[derive(Debug)]
pub(super) enum Work {
    Prefill(usize),
    Store(Store, usize),
    /// A part of what was lent early is computed.
    Compute(Lent, u32),
    /// So many parts are ready.
    Count(Grant, u32),
    Sweep,
    Scribble,
    ScribbleOver(Vec<u32>),
}

/// What a reader's process learns.
#[derive(Debug)]
pub(super) enum News {
    Ticket(Ticket),
    Greeted(usize, BootEpoch),
    Landed(Target),
    Event(towline_wire::handoff::Event),
    HeartbeatDue,
}

#[derive(Debug)]
pub(super) enum Happening {
    Owner(usize, Work),
    /// A reader dials whatever owner there is.
    Dial(usize),
    /// A message of reader, in a session with that incarnation.
    Ask(usize, usize, Ask),
    /// The owner's memory is read for that reader.
    Copy(usize, Target),
    Reader(usize, News),
    Fault(Fault),
}

pub(super) struct World<'a> {
    pub(super) now: u64,
    pub(super) scenario: Scenario,
    pub(super) mutant: Mutant,
    pub(super) random: Random,
    pub(super) owners: Vec<Owner>,
    pub(super) readers: Vec<Reader>,
    pub(super) tally: &'a mut Tally,
    queue: BTreeMap<(u64, u64), Happening>,
    sequence: u64,
    /// The number of the last work that was nobody's request.
    pub(super) foreign: u64,
    trace: bool,
}

impl<'a> World<'a> {
    /// Runs the world of `seed` to its end.
    pub(super) fn run(seed: u64, mutant: Mutant, trace: bool, tally: &'a mut Tally) -> Result<(), Violation> {
        let mut random = Random::new(seed.wrapping_mul(0xd134_2543_de82_ef95));
        let scenario = Scenario::of(&mut random);
        if trace {
            println!("seed {seed}: {scenario:#?}");
        }
        let readers = scenario.requests.iter().enumerate();
        let readers = readers
            .flat_map(|(index, request)| (0..request.readers as usize).map(move |n| Reader::new(index, n)));
        let first = Owner::new(&scenario, BootEpoch(random.next()));
        let mut world = Self {
            now: 0,
            readers: readers.collect(),
            owners: vec![first],
            scenario,
            mutant,
            random,
            tally,
            queue: BTreeMap::new(),
            sequence: 0,
            foreign: FOREIGN,
            trace,
        };
        for (index, at) in world.scenario.requests.iter().map(|r| r.at_us).enumerate().collect::<Vec<_>>() {
            world.at(at, Happening::Owner(0, Work::Prefill(index)));
        }
        for (at, fault) in world.scenario.faults.clone() {
            world.at(at, Happening::Fault(fault));
        }
        world.live()
    }

    fn live(&mut self) -> Result<(), Violation> {
        while let Some(((at, _), happening)) = self.queue.pop_first() {
            self.now = at;
            if self.trace {
                println!("{at:>7} µs  {happening:?}");
            }
            self.happen(happening)?;
            self.check_step()?;
        }
        self.check_end()
    }

    pub(super) fn at(&mut self, us: u64, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((us, self.sequence), happening);
    }

    pub(super) fn after(&mut self, us: u64, happening: Happening) {
        self.at(self.now + us, happening);
    }

    /// After a random time of at most `us`.
    pub(super) fn soon(&mut self, us: u64, happening: Happening) {
        let delay = self.random.within(0, us);
        self.after(delay, happening);
    }

    pub(super) fn current(&self) -> usize {
        self.owners.len() - 1
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        match happening {
            Happening::Owner(incarnation, work) => {
                let owner = &self.owners[incarnation];
                let wants_book = matches!(work, Work::Prefill(_) | Work::Sweep | Work::Count(..));
                let busy = owner.busy_until(self.now).filter(|_| wants_book || owner.paused_until > self.now);
                if let Some(until) = busy.filter(|_| owner.alive) {
                    self.at(until, Happening::Owner(incarnation, work));
                } else if owner.alive {
                    self.work(work)?;
                } else if let Work::Prefill(request) = work
                    && self.now < QUIET_US
                {
                    // The router tries again; whoever owns the name by then answers.
                    self.after(3_000, Happening::Owner(self.current(), Work::Prefill(request)));
                }
                Ok(())
            }
            Happening::Dial(reader) => {
                self.dial(reader);
                Ok(())
            }
            Happening::Ask(reader, incarnation, ask) => self.handle_ask(reader, incarnation, ask),
            Happening::Copy(reader, target) => {
                self.copy(reader, target);
                Ok(())
            }
            Happening::Reader(reader, news) => {
                let paused_until = self.readers[reader].paused_until;
                if self.readers[reader].crashed {
                    return Ok(());
                }
                if paused_until > self.now {
                    self.at(paused_until, Happening::Reader(reader, news));
                    return Ok(());
                }
                self.handle_news(reader, news)
            }
            Happening::Fault(fault) => {
                self.fail(fault);
                Ok(())
            }
        }
    }

    fn fail(&mut self, fault: Fault) {
        let now = self.now;
        let current = self.current();
        match fault {
            Fault::OwnerCrashes => self.owners[current].alive = false,
            Fault::OwnerRestarts if self.owners[current].alive => {}
            Fault::OwnerRestarts => {
                let epoch = BootEpoch(self.random.next());
                self.owners.push(Owner::new(&self.scenario, epoch));
            }
            Fault::OwnerPauses(us) => later(&mut self.owners[current].paused_until, now + us),
            Fault::ReaderCrashes(reader) => self.readers[reader].crashed = true,
            Fault::ReaderPauses(reader, us) => later(&mut self.readers[reader].paused_until, now + us),
            Fault::Cut(reader, us) => later(&mut self.readers[reader].cut_until, now + us),
            Fault::Cancel(reader) => {
                let cancel = News::Event(towline_wire::handoff::Event::Cancelled);
                self.after(0, Happening::Reader(reader, cancel));
            }
        }
    }
}
