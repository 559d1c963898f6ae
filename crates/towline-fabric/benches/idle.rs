//! What idle peers cost: `cargo bench -p towline-fabric --bench idle [-- SECONDS [PEERS]]`, 60 s and 100 peers unless said.
//!
//! Two processes, this one and its child, with all transports; half of the peers over shm, half over tcp; one lease is
//! held. After the connects nothing is asked for. One JSON line: processor time of all threads of both processes, as a
//! share of one core, and how often they woke. The limit of the design is 0.5 %.
//!
//! **Measured** (2026-11-30, otherwise idle, 60 s, 100 peers): 0.005 % of a core on a 2-core EPYC, 0.071 % on a 2-core Xeon; on both
//! 25 wake-ups for 12 heartbeats.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark: what fails stops it, and it prints"
)]

use std::fs::{read_dir, read_to_string};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_fabric::{
    Agent, AgentConfig, ConnectOptions, Limits, Memory, Owner, Peer, RegionOptions, ShmConfig,
    TransportChoice,
};
use towline_wire::auth::{ClusterKey, Identity};
use towline_wire::blocks::Extent;
use towline_wire::card::Fingerprint;
use towline_wire::frame::Status;
use towline_wire::id::{AgentName, EngineId, Generation, LeaseId, RegionId};
use towline_wire::lease::LeaseError;
use towline_wire::receipt::TransportKind;

const PATIENCE: Duration = Duration::from_secs(60);
/// What follows a connect (deadlines of handshakes, 10 s at most) is past by then.
const SETTLE: Duration = Duration::from_secs(11);

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

fn agent(name: &str) -> Agent {
    // Neither path nor session is put to rest: all are to be there, idle.
    let limits = Limits { path_idle: Duration::MAX, session_idle: Duration::MAX, ..Limits::default() };
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
        limits,
        ucx: None,
        telemetry: None,
    };
    Agent::start(config, Arc::new(Anything)).unwrap()
}

fn serve() {
    let agent = agent("idle-owner");
    let memory = Arc::new(Memory::allocate("idle", 1 << 20).unwrap());
    let _region = agent.register(memory, RegionOptions::default()).unwrap();
    println!("{}", agent.address());
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Nanoseconds on a processor and voluntary switches, of all threads of a process.
fn spent(process: u32) -> (u64, u64) {
    let tasks = read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.fold((0, 0), |(nanos, switches), task| {
        let task = task.unwrap().path();
        let on_cpu = read_to_string(task.join("schedstat")).unwrap();
        let status = read_to_string(task.join("status")).unwrap();
        let switched = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        let on_cpu: u64 = on_cpu.split(' ').next().unwrap().parse().unwrap();
        (nanos + on_cpu, switches + switched.trim().parse::<u64>().unwrap())
    })
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    if words.first().is_some_and(|word| word == "serve") {
        return serve();
    }
    let number = |at: usize, otherwise: u64| words.get(at).map_or(otherwise, |word| word.parse().unwrap());
    let (seconds, count) = (number(0, 60), number(1, 100));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let reader = agent("idle-reader");
    let peers: Vec<Peer> = [TransportKind::Shm, TransportKind::Tcp]
        .into_iter()
        .cycle()
        .take(usize::try_from(count).unwrap())
        .map(|kind| {
            let options = ConnectOptions { transport: TransportChoice::Only(kind), ..Default::default() };
            reader.connect(address.trim(), options).wait(PATIENCE).unwrap().unwrap()
        })
        .collect();
    let _held = peers.first().map(|peer| peer.hold(LeaseId(1)).unwrap());
    std::thread::park_timeout(SETTLE);
    let all = || [std::process::id(), child.id()].map(spent);
    let (before, began, beats) = (all(), Instant::now(), reader.stats().heartbeats);
    std::thread::park_timeout(Duration::from_secs(seconds));
    let (after, lasted, beats) = (all(), began.elapsed(), reader.stats().heartbeats - beats);
    let sum = |spent: [(u64, u64); 2]| (spent[0].0 + spent[1].0, spent[0].1 + spent[1].1);
    let ((nanos, woken), (nanos_before, woken_before)) = (sum(after), sum(before));
    #[expect(clippy::cast_precision_loss, reason = "a share; 2^53 ns are a hundred days")]
    let percent = (nanos - nanos_before) as f64 / lasted.as_nanos() as f64 * 100.0;
    let line = serde_json::json!({
        "peers": count, "leases": 1, "seconds": lasted.as_secs_f64(), "percent_of_a_core": percent,
        "wake_ups": woken - woken_before, "heartbeats": beats,
    });
    println!("{line}");
    drop(child.stdin.take());
    let _ = child.wait();
}
