//! The owner, in a process of its own: it lends one pool under one lease, and can be told to end the lease, to take the
//! region back, or to wait until its peers are gone.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use rustix::process::Signal;
use towline_fabric::{Access, Agent, Memory, Owner, RegionOptions, RegionRole, ShmConfig};
use towline_wire::auth::Identity;
use towline_wire::blocks::Extent;
use towline_wire::fence::{COMPLEMENT_AT, GENERATION_AT, PARTS_AT, SLOT_BYTES};
use towline_wire::frame::Status;
use towline_wire::id::{BootEpoch, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;

use super::pool::{BYTES, SENT, fill, is_filled};
use super::process::{Process, orders, say, variable};
use crate::support::{LEASE, config, eventually, memory};

const FOLDER: &str = "TOWLINE_TEST_FOLDER";
const SEED: &str = "TOWLINE_TEST_SEED";
const INBOX: &str = "TOWLINE_TEST_INBOX_BYTES";

/// Lends until its lease is over.
#[derive(Default)]
struct Lender {
    over: AtomicBool,
    notifications: AtomicUsize,
}

impl Lender {
    fn check(&self, lease: LeaseId, generation: Generation) -> bool {
        !self.over.load(Ordering::Acquire) && (lease, generation) == LEASE
    }
}

impl Owner for Lender {
    fn admit(&self, _: RegionId, lease: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        let good = lease.is_none_or(|(lease, generation)| self.check(lease, generation));
        if good { Ok(()) } else { Err(Status::LeaseExpired) }
    }

    fn handle_release(&self, _: &Identity, lease: LeaseId, generation: Generation) -> Result<(), LeaseError> {
        if self.check(lease, generation) { Ok(()) } else { Err(LeaseError::Over { lease }) }
    }

    fn handle_heartbeat(&self, _: &Identity, _: &[LeaseId]) {}
    fn handle_peer_gone(&self, _: &Identity) {}

    fn handle_notify(&self, _: &Identity, _: Vec<u8>) {
        self.notifications.fetch_add(1, Ordering::AcqRel);
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
    let writable = RegionOptions { peer_writable: true, ..RegionOptions::default() };
    let writes = agent.register(Arc::clone(&inbox), writable).unwrap();
    let options = |role, leased| RegionOptions { role, leased, peer_writable: false };
    let mut region = Some(agent.register(Arc::clone(&kv), options(RegionRole::Kv, true)).unwrap());
    let fences = agent.register(Arc::clone(&slot), options(RegionRole::Fence, false)).unwrap();
    let ids = [region.as_ref().unwrap().id(), fences.id(), writes.id()].map(|id| id.to_string()).join(" ");
    say(&format!("{} {ids} {}", agent.bound(), agent.boot_epoch().0));
    for order in orders() {
        match order.as_str() {
            "expire" => {
                lender.over.store(true, Ordering::Release);
                show(&slot, LEASE.1.0 + 1, 0);
                // The next user of the blocks.
                fill(&kv, 0xee);
            }
            "deregister" => drop(region.take()),
            "hear one notification" => {
                eventually("it is heard", || lender.notifications.load(Ordering::Acquire) == 1)
            }
            "hear nothing" => assert_eq!(lender.notifications.load(Ordering::Acquire), 0),
            "find the write" => assert!(is_filled(&inbox, SENT)),
            "settle" => {
                let ours = 1 + usize::from(region.is_some());
                eventually("its peers are gone", || {
                    let stats = agent.stats();
                    (stats.sessions, stats.unauthenticated) == (0, 0)
                });
                eventually("nobody else holds its memory", || {
                    (Arc::strong_count(&kv), Arc::strong_count(&inbox)) == (ours, 2)
                });
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
