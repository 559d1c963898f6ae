//! How fast one process pulls from another: `cargo bench -p towline-fabric --bench pull [-- shm|cma|tcp] [huge]`.
//!
//! One JSON line a case, then the table is yours. The owner is this binary, run again; both share the machine's cores.
//! `cma` is shm to foreign memory. With `huge` memory has huge pages if the host grants them, else a line says why not.
//! Cases: a prompt's KV (128 blocks of 360 KiB, in random order, 45 MiB), 256 MiB, 64 KiB and 4 KiB in one piece, and
//! 45 MiB in pages of 4 KiB.
//!
//! **Measured** on 2 virtual cores of a Xeon with a load of 7 from other builds, so each thread had a third of a core;
//! best and median of the rounds. The yardstick (`memcpy` by one thread, 45 MiB) took 8.3 ms and 13 ms in that run.
//!
//! ```text
//!  case                              shm best   shm p50    tcp best   tcp p50
//!  45 MiB in 360 KiB blocks, random    9.1 ms     20 ms       25 ms     37 ms
//!  45 MiB in 4 KiB pages, random        12 ms     18 ms       44 ms     52 ms
//!  256 MiB contiguous                  105 ms    127 ms      179 ms    216 ms
//!  64 KiB                             2.0 us    2.1 us       15 us     21 us
//!  4 KiB                              0.9 us    0.9 us       10 us     16 us
//!  connect, handshake to path          0.7 ms                0.4 ms
//! ```

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a benchmark: what fails stops it, and it prints"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use towline_fabric::{
    Access, Agent, AgentConfig, ConnectOptions, Limits, Memory, MemoryOptions, Owner, Pages, Peer,
    RegionOptions, ShmConfig, TransferRequest, TransportChoice,
};
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::{BlockList, Extent};
use towline_wire::card::Fingerprint;
use towline_wire::frame::Status;
use towline_wire::id::{AgentName, EngineId, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;
use towline_wire::receipt::{Op, TransportKind};

const REGION: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Name, bytes of a block, blocks, whether in random order, rounds.
const CASES: [(&str, u64, u32, bool, usize); 5] = [
    ("45 MiB in 360 KiB blocks, random", 360 << 10, 128, true, 40),
    ("256 MiB contiguous", 256 << 20, 1, false, 12),
    ("64 KiB", 64 << 10, 1, false, 2000),
    ("4 KiB", 4 << 10, 1, false, 2000),
    ("45 MiB in 4 KiB pages, random", 4 << 10, 11_520, true, 20),
];

struct Anything;

impl Owner for Anything {
    fn admit(&self, _: RegionId, _: Option<(LeaseId, Generation)>, _: &[Extent]) -> Result<(), Status> {
        Ok(())
    }
    fn handle_release(&self, _: &Identity, _: LeaseId, _: Generation) -> Result<(), LeaseError> {
        Ok(())
    }
    fn handle_heartbeat(&self, _: &Identity, _: &[LeaseId]) {}
    fn handle_notify(&self, _: &Identity, _: Vec<u8>) {}
    fn handle_peer_gone(&self, _: &Identity) {}
}

/// Word, transport, and which of the owner's regions.
const WAYS: [(&str, TransportKind, usize); 3] =
    [("shm", TransportKind::Shm, 0), ("cma", TransportKind::Shm, 1), ("tcp", TransportKind::Tcp, 0)];

/// Whether the command line has the word.
fn told(word: &str) -> bool {
    std::env::args().any(|argument| argument == word)
}

fn main() {
    if told("serve") {
        return serve();
    }
    let all = WAYS.iter().all(|(way, ..)| !told(way));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("serve").args(told("huge").then_some("huge"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let reader = agent("bench-reader");
    copy_here();
    for (way, kind, region) in WAYS.into_iter().filter(|(way, ..)| all || told(way)) {
        let transport = TransportChoice::Only(kind);
        let options = ConnectOptions { transport, ..ConnectOptions::default() };
        let started = Instant::now();
        let peer = reader.connect(words[0], options).wait(PATIENCE).unwrap().unwrap();
        let connect_ms = started.elapsed().as_secs_f64() * 1e3;
        println!("{}", serde_json::json!({ "transport": way, "connect_ms": connect_ms }));
        for case in CASES {
            measure(&peer, (way, RegionId(words[1 + region].parse().unwrap())), case);
        }
    }
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// Own memory.
fn memory(bytes: u64) -> Arc<Memory> {
    let pages = if told("huge") { Pages::HugeIfGranted } else { Pages::Normal };
    let memory = Memory::allocate_with("bench", bytes, MemoryOptions { pages, ..MemoryOptions::default() });
    let memory = memory.unwrap();
    if let Some(why) = memory.why_normal_pages() {
        eprintln!("{why}");
    }
    Arc::new(memory)
}

/// Somebody else's.
#[expect(unsafe_code, reason = "it wraps a pointer")]
fn foreign(bytes: u64) -> Arc<Memory> {
    let buffer: Arc<Vec<AtomicU64>> = Arc::new((0..bytes / 8).map(AtomicU64::new).collect());
    let base = NonNull::new(buffer.as_ptr().cast_mut().cast()).unwrap();
    // SAFETY: atomics, kept by the guard, to which nobody else has a reference.
    Arc::new(unsafe { Memory::foreign(base, bytes, Access::PeersRead, buffer) }.unwrap())
}

/// What one thread of this machine copies from memory to memory: the yardstick.
fn copy_here() {
    let [from, to] = ["a", "b"].map(|name| Memory::allocate(name, 45 << 20).unwrap());
    let mut times: Vec<f64> = (0..40)
        .map(|_| {
            let started = Instant::now();
            to.copy_from(0, &from, 0, from.len()).unwrap();
            started.elapsed().as_secs_f64()
        })
        .collect();
    report("memcpy", ("45 MiB by one thread", from.len()), &mut times);
}

fn serve() {
    let agent = agent("bench-owner");
    let regions = [memory(REGION), foreign(REGION)].map(|memory| {
        for at in (0..REGION).step_by(4096) {
            memory.write_from(at, &at.to_le_bytes()).unwrap();
        }
        agent.register(memory, RegionOptions::default()).unwrap()
    });
    println!("{} {} {}", agent.address(), regions[0].id(), regions[1].id());
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn agent(name: &str) -> Agent {
    let config = AgentConfig {
        name: AgentName::new(name).unwrap(),
        engine: EngineId::from_bytes([1; 16]),
        key: ClusterKey::from_bytes([1; 32]),
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        shm: ShmConfig::Abstract,
        tcp: true,
        fingerprint: Fingerprint::default(),
        copy_threads: 2,
        tcp_streams: 2,
        limits: Limits::default(),
        ucx: None,
        telemetry: None,
    };
    Agent::start(config, Arc::new(Anything)).unwrap()
}

fn measure(
    peer: &Peer,
    (way, region): (&str, RegionId),
    (name, block_bytes, count, random, rounds): (&str, u64, u32, bool, usize),
) {
    let local = memory(block_bytes * u64::from(count));
    let list = |indices| BlockList { group: 0, bases: vec![0], block_bytes, stride: block_bytes, indices };
    let mut indices: Vec<u32> = (0..count).collect();
    if random {
        shuffle(&mut indices);
    }
    let request = TransferRequest {
        op: Op::Read,
        local: Arc::clone(&local),
        local_blocks: list((0..count).collect()),
        remote_region: region,
        remote_blocks: list(indices.clone()),
        lease: None,
        deadline: PATIENCE,
        hold: None,
        notify: None,
    };
    let mut times: Vec<f64> = (0..rounds + 2)
        .map(|_| {
            let started = Instant::now();
            let receipt = peer.transfer(request.clone()).unwrap().wait(PATIENCE).unwrap().unwrap();
            assert_eq!(receipt.bytes, local.len());
            started.elapsed().as_secs_f64()
        })
        .collect();
    check(&local, block_bytes, &indices);
    report(way, (name, local.len()), &mut times);
}

fn report(transport: &str, (case, bytes): (&str, u64), times: &mut Vec<f64>) {
    let first = times[0];
    times.drain(..2);
    times.sort_by(f64::total_cmp);
    let (best, p50, p99) = (times[0], times[times.len() / 2], times[times.len() * 99 / 100]);
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = bytes as f64 / p50 / 1e9;
    let line = serde_json::json!({
        "transport": transport, "case": case, "bytes": bytes, "rounds": times.len(), "gb_per_s": rate,
        "best_ms": best * 1e3, "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "first_ms": first * 1e3,
    });
    println!("{line}");
}

/// The first bytes of each page tell where it came from.
fn check(local: &Memory, block_bytes: u64, indices: &[u32]) {
    for (place, index) in (0u64..).zip(indices) {
        let mut word = [0; 8];
        local.read_into(place * block_bytes, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), u64::from(*index) * block_bytes);
    }
}

/// The same order on every run.
fn shuffle(indices: &mut [u32]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (1..indices.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let other = usize::try_from(state % (at as u64 + 1)).unwrap();
        indices.swap(at, other);
    }
}
