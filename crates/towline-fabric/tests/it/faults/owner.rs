//! The owner, in a process of its own: it lends one pool, and an inbox to write into, under one lease, and can be told to end
//! the lease, to take a region back, or to wait until its peers are gone.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use rustix::process::Signal;
use towline_fabric::{Access, Agent, Memory, Owner, RegionOptions, RegionRole, ShmConfig};
use towline_wire::auth::Identity;
use towline_wire::blocks::Extent;
use towline_wire::fence::{COMPLEMENT_AT, GENERATION_AT, PARTS_AT, SLOT_BYTES};
use towline_wire::frame::Status;
use towline_wire::id::{BootEpoch, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;

use super::pool::{BLOCK, BYTES, SENT, fill, is_filled, is_untouched, poison};
use super::process::{Process, orders, say, variable};
use crate::support::{LEASE, config, contents, eventually, memory};

const FOLDER: &str = "TOWLINE_TEST_FOLDER";
const SEED: &str = "TOWLINE_TEST_SEED";
const INBOX: &str = "TOWLINE_TEST_INBOX_BYTES";

/// Lends under one lease at a time: when it is over, the next one is of a later generation.
pub(super) struct Lender {
    generation: AtomicU64,
    releases: AtomicUsize,
    notifications: AtomicUsize,
    gone: AtomicUsize,
}

impl Default for Lender {
    fn default() -> Self {
        let none = AtomicUsize::default;
        let generation = AtomicU64::new(LEASE.1.0);
        Self { generation, releases: none(), notifications: none(), gone: none() }
    }
}

impl Lender {
    /// The lease as it is now.
    pub(super) fn lease(&self) -> (LeaseId, Generation) {
        (LEASE.0, Generation(self.generation.load(Ordering::Acquire)))
    }

    /// Ends the lease.
    pub(super) fn expire(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Releases that were heard, of whatever lease.
    pub(super) fn releases(&self) -> usize {
        self.releases.load(Ordering::Acquire)
    }

    /// Control sessions that have ended.
    pub(super) fn gone(&self) -> usize {
        self.gone.load(Ordering::Acquire)
    }
}

impl Owner for Lender {
    fn admit(&self, _: RegionId, lease: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        if lease.is_none_or(|lease| lease == self.lease()) { Ok(()) } else { Err(Status::LeaseExpired) }
    }

    fn handle_release(&self, _: &Identity, lease: LeaseId, generation: Generation) -> Result<(), LeaseError> {
        self.releases.fetch_add(1, Ordering::AcqRel);
        if (lease, generation) == self.lease() { Ok(()) } else { Err(LeaseError::Over { lease }) }
    }

    fn handle_heartbeat(&self, _: &Identity, _: &[LeaseId]) {}

    fn handle_notify(&self, _: &Identity, _: Vec<u8>) {
        self.notifications.fetch_add(1, Ordering::AcqRel);
    }

    fn handle_peer_gone(&self, _: &Identity) {
        self.gone.fetch_add(1, Ordering::AcqRel);
    }
}

/// Shows `generation` in the fence slot, in the order that a reader may rely on: the generation last.
fn show(slot: &Memory, generation: u64, parts: u64) {
    slot.store_u64(PARTS_AT, parts).unwrap();
    slot.store_u64(COMPLEMENT_AT, !generation).unwrap();
    slot.store_u64(GENERATION_AT, generation).unwrap();
    fence(Ordering::SeqCst);
}

#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_lends() {
    let lender = Arc::new(Lender::default());
    let mut config = config("owner");
    config.shm = ShmConfig::Dir(variable(FOLDER).into());
    let agent = Agent::start(config, Arc::<Lender>::clone(&lender)).unwrap();
    let (kv, slot) = (memory(BYTES), memory(SLOT_BYTES));
    fill(&kv, variable(SEED).parse().unwrap());
    show(&slot, LEASE.1.0, 1);
    let inbox_bytes = variable(INBOX).parse().unwrap();
    let inbox = Arc::new(Memory::allocate_for("inbox", inbox_bytes, Access::PeersWrite).unwrap());
    let writable = RegionOptions { peer_writable: true, leased: true, ..RegionOptions::default() };
    let mut writes = Some(agent.register(Arc::clone(&inbox), writable).unwrap());
    let options = |role, leased| RegionOptions { role, leased, peer_writable: false };
    let mut region = Some(agent.register(Arc::clone(&kv), options(RegionRole::Kv, true)).unwrap());
    let fences = agent.register(Arc::clone(&slot), options(RegionRole::Fence, false)).unwrap();
    let ids = [region.as_ref().unwrap(), &fences, writes.as_ref().unwrap()];
    let ids = ids.map(|region| region.id().to_string()).join(" ");
    say(&format!("{} {ids} {}", agent.bound(), agent.boot_epoch().0));
    for order in orders() {
        match order.as_str() {
            "expire" => {
                lender.expire();
                show(&slot, lender.lease().1.0, 0);
                // The next user of the blocks.
                fill(&kv, 0xee);
            }
            "deregister" => drop(region.take()),
            "deregister the inbox" => drop(writes.take()),
            "hear one notification" => {
                eventually("it is heard", || lender.notifications.load(Ordering::Acquire) == 1)
            }
            "hear nothing" => assert_eq!(lender.notifications.load(Ordering::Acquire), 0),
            "find the write" => assert!(is_filled(&inbox, SENT)),
            // One slice had been written, and one been admitted.
            "find what was admitted" => assert!(is_untouched(&inbox, 2 * BLOCK)),
            "poison the inbox" => inbox.write_from(0, &poison(inbox_bytes)).unwrap(),
            "find the poison" => assert!(contents(&inbox) == poison(inbox_bytes)),
            "settle" => {
                let ours = [&region, &writes].map(|region| 1 + usize::from(region.is_some()));
                eventually("its peers are gone", || {
                    let stats = agent.stats();
                    (stats.sessions, stats.unauthenticated) == (0, 0)
                });
                eventually("nobody else holds its memory", || [&kv, &inbox].map(Arc::strong_count) == ours);
            }
            other => panic!("no such order: {other}"),
        }
        say(&order);
    }
}

/// An owner's process, and what a ticket of it would say.
pub(super) struct Lending {
    pub(super) process: Process,
    pub(super) address: SocketAddr,
    pub(super) kv: RegionId,
    pub(super) fences: RegionId,
    pub(super) inbox: RegionId,
    pub(super) epoch: BootEpoch,
    pub(super) seed: u64,
    /// Its Unix socket.
    pub(super) socket: PathBuf,
}

impl Lending {
    /// Starts one whose Unix socket lies in `folder`, whose bytes tell `seed`, and that takes `inbox_bytes`.
    pub(super) fn start(folder: &Path, seed: u64, inbox_bytes: u64) -> Self {
        let variables = [
            (FOLDER, folder.display().to_string()),
            (SEED, seed.to_string()),
            (INBOX, inbox_bytes.to_string()),
        ];
        let process = Process::start("faults::owner::child_lends", &variables);
        let said = process.answer();
        let words: Vec<_> = said.split(' ').collect();
        let region = |word: &str| RegionId(word.parse().unwrap());
        let epoch = words[4].parse().unwrap();
        Self {
            process,
            address: words[0].parse().unwrap(),
            kv: region(words[1]),
            fences: region(words[2]),
            inbox: region(words[3]),
            epoch: BootEpoch(epoch),
            seed,
            socket: folder.join(format!("{epoch:016x}.sock")),
        }
    }

    pub(super) fn stop(&self) {
        self.process.signal(Signal::STOP);
    }

    pub(super) fn go_on(&self) {
        self.process.signal(Signal::CONT);
    }
}
