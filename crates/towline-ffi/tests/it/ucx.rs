//! Two workers of this process and the UCX that is installed, over tcp on the loopback interface and over shared memory.

use std::cell::{Cell, RefCell};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towline_ffi::library::LibraryError;
use towline_ffi::pinned::Pinned;
use towline_ffi::ucx::lanes::Source;
use towline_ffi::ucx::{
    Batch, Context, Endpoint, ErrorHandling, Finished, Mapped, Piece, Reach, RemoteKey, Settings, Ucx,
    UcxError, Worker,
};

use crate::memory::Bytes;
use crate::skips;

const PATIENCE: Duration = Duration::from_secs(20);
const LEN: usize = 1 << 20;

/// The library, or a line that says why not.
fn ucx() -> Option<Arc<Ucx>> {
    let named = std::env::var_os("TOWLINE_UCX_LIBRARY").map(PathBuf::from);
    match Ucx::open(named.as_deref()) {
        Ok(ucx) => Some(Arc::new(ucx)),
        Err(error @ LibraryError::NotFound { .. }) if named.is_none() => {
            skips::note("UCX", &format!("{error} (apt-get install libucx0)"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn context(ucx: &Arc<Ucx>, transports: &str) -> Arc<Context> {
    let mut settings = Settings::read(ucx).unwrap();
    settings.set("TLS", transports).unwrap();
    // Software only: no device is needed for these.
    settings.set("NET_DEVICES", "lo").unwrap();
    Context::new(&settings, "towline-test").unwrap()
}

/// What happened, as a test's callbacks note it.
#[derive(Clone, Default)]
struct Outcome(Rc<RefCell<Option<Result<(), UcxError>>>>);

impl Outcome {
    fn finished(&self) -> Finished {
        let slot = self.clone();
        Box::new(move |outcome| assert!(slot.0.replace(Some(outcome)).is_none(), "told twice"))
    }

    fn is_there(&self) -> bool {
        self.0.borrow().is_some()
    }

    fn take(&self) -> Result<(), UcxError> {
        self.0.take().unwrap()
    }
}

/// A byte that tells its place.
fn pattern(at: usize) -> u8 {
    u8::try_from(at % 251).unwrap()
}

/// A process with a memory, as far as UCX is concerned.
struct Side {
    worker: Worker,
    bytes: Arc<Bytes>,
    mapped: Arc<Mapped>,
}

impl Side {
    fn new(context: &Arc<Context>, byte: impl Fn(usize) -> u8) -> Self {
        let bytes = Bytes::new((0..LEN).map(byte));
        let memory: Arc<dyn Pinned> = Arc::<Bytes>::clone(&bytes);
        let mapped = Arc::new(context.map(memory, Reach::PeersWrite).unwrap());
        Self { worker: Worker::new(context).unwrap(), bytes, mapped }
    }

    fn connect(&self, peer: &Self, errors: ErrorHandling) -> (Endpoint, Outcome) {
        let failed = Outcome::default();
        let address = peer.worker.address().unwrap();
        let endpoint = Endpoint::connect(&self.worker, &address, errors, failed.finished()).unwrap();
        (endpoint, failed)
    }
}

/// Progresses both until `enough`.
fn until(sides: [&Side; 2], enough: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !enough() {
        assert!(Instant::now() < end, "it never came to its end");
        sides.iter().for_each(|side| _ = side.worker.progress());
    }
}

/// Makes a batch by `ask`, and gives what became of it.
fn run(sides: [&Side; 2], key: &RemoteKey, ask: impl FnOnce(&Batch)) -> Result<(), UcxError> {
    let outcome = Outcome::default();
    let batch = Batch::between(Arc::clone(&sides[0].mapped), key.clone(), outcome.finished());
    ask(&batch);
    drop(batch);
    until(sides, || outcome.is_there());
    outcome.take()
}

fn piece(side: &Side, local_offset: usize, remote_offset: usize, len: usize) -> Piece {
    Piece { local_offset, remote_address: side.bytes.address() + remote_offset as u64, len }
}

#[test]
fn pieces_are_read_and_written_whole_and_nothing_else_changes() {
    let Some(ucx) = ucx() else { return };
    for (transports, errors, word) in
        [("tcp", ErrorHandling::Peer, "tcp"), ("sysv,self", ErrorHandling::None, "sysv")]
    {
        let context = context(&ucx, transports);
        let (here, there) = (Side::new(&context, |_| 0xaa), Side::new(&context, pattern));
        let sides = [&here, &there];
        let (endpoint, failed) = here.connect(&there, errors);
        let key = endpoint.unpack(&there.mapped.key().unwrap()).unwrap();
        let pieces = [(0, 4096, 1), (100, 7, 4096), (8192, 300_000, 500_000), (1_000_000, 0, 8)];
        run(sides, &key, |batch| {
            pieces.iter().for_each(|(to, from, len)| batch.get(piece(&there, *to, *from, *len)))
        })
        .unwrap();
        let mut expected = vec![0xaa; LEN];
        for (to, from, len) in pieces {
            (0..len).for_each(|at| expected[to + at] = pattern(from + at));
        }
        assert!(here.bytes.copy() == expected, "{transports}");
        run(sides, &key, |batch| {
            batch.put(piece(&there, 0, 10, 300_000));
            batch.flush();
        })
        .unwrap();
        assert!(there.bytes.copy()[10..300_010] == expected[..300_000], "{transports}");
        let lanes = endpoint.lanes().unwrap().expect("lanes that are understood");
        assert!(lanes.lanes.iter().any(|lane| lane.transport == word), "{lanes:?}\n{}", endpoint.describe());
        let expected = if ucx.version().minor < 14 { Source::PrintInfo } else { Source::Query };
        assert_eq!(lanes.source, expected);
        assert!(!failed.is_there());
    }
}

#[test]
fn a_piece_outside_of_the_local_memory_is_refused_before_ucx_sees_it() {
    let Some(ucx) = ucx() else { return };
    let context = context(&ucx, "tcp");
    let (here, there) = (Side::new(&context, |_| 0), Side::new(&context, |_| 1));
    let (endpoint, _failed) = here.connect(&there, ErrorHandling::Peer);
    let key = endpoint.unpack(&there.mapped.key().unwrap()).unwrap();
    for (offset, len) in [(LEN, 1), (0, LEN + 1), (usize::MAX, 2)] {
        let error = run([&here, &there], &key, |batch| {
            let piece = Piece { local_offset: offset, remote_address: there.bytes.address(), len };
            batch.get(piece);
            assert!(batch.has_failed());
        });
        assert_eq!(error.unwrap_err().call, "ucp_get_nbx");
    }
}

#[test]
fn a_batch_ends_once_when_all_that_joined_have_and_it_was_dropped() {
    let Some(ucx) = ucx() else { return };
    let context = context(&ucx, "tcp");
    let (here, there) = (Side::new(&context, |_| 0), Side::new(&context, |_| 1));
    let (endpoint, _failed) = here.connect(&there, ErrorHandling::Peer);
    let key = endpoint.unpack(&there.mapped.key().unwrap()).unwrap();
    let outcome = Outcome::default();
    let batch = Batch::between(Arc::clone(&here.mapped), key, outcome.finished());
    (0..1000).for_each(|page| batch.get(piece(&there, page * 1024, page * 1024, 1024)));
    let seen = Cell::new(0);
    until([&here, &there], || {
        seen.set(seen.get() + 1);
        seen.get() > 1000
    });
    assert!(!outcome.is_there(), "more may join");
    drop(batch);
    until([&here, &there], || outcome.is_there());
    outcome.take().unwrap();
}

#[test]
fn a_flush_ends_once_the_peer_has_answered() {
    let Some(ucx) = ucx() else { return };
    let context = context(&ucx, "tcp");
    let (here, there) = (Side::new(&context, |_| 0), Side::new(&context, |_| 1));
    let (endpoint, _failed) = here.connect(&there, ErrorHandling::Peer);
    let outcome = Outcome::default();
    Batch::of(&endpoint, outcome.finished()).flush();
    (0..1000).for_each(|_| _ = here.worker.progress());
    assert!(!outcome.is_there(), "the peer hasn't looked");
    until([&here, &there], || outcome.is_there());
    outcome.take().unwrap();
    let outcome = Outcome::default();
    Batch::of(&endpoint, outcome.finished()).get(piece(&there, 0, 0, 1));
    until([&here, &there], || outcome.is_there());
    assert!(outcome.take().is_err(), "it has no memories");
}

#[test]
fn closing_an_endpoint_ends_what_is_in_flight_and_lets_go_of_the_memory() {
    let Some(ucx) = ucx() else { return };
    let context = context(&ucx, "tcp");
    let (here, there) = (Side::new(&context, |_| 0), Side::new(&context, |_| 1));
    let outcome = Outcome::default();
    {
        let (endpoint, _failed) = here.connect(&there, ErrorHandling::Peer);
        let key = endpoint.unpack(&there.mapped.key().unwrap()).unwrap();
        let batch = Batch::between(Arc::clone(&here.mapped), key, outcome.finished());
        batch.get(piece(&there, 0, 0, LEN));
        // The peer doesn't progress, so nothing can have come.
        endpoint.close();
    }
    until([&here, &here], || outcome.is_there());
    assert!(outcome.take().unwrap_err().is_cancelled());
    until([&here, &here], || Arc::strong_count(&here.mapped) == 1);
}

/// The variable that makes [`a_process_with_memory`] one.
const OWNER: &str = "TOWLINE_TEST_UCX_OWNER";

/// Another process with memory, killed when dropped.
struct Process {
    child: Child,
    address: Vec<u8>,
    key: Vec<u8>,
    base: u64,
}

impl Process {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ucx::a_process_with_memory", "--nocapture"]).env(OWNER, "1");
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let said = lines.find_map(|line| line.strip_prefix("owner ").map(str::to_owned)).unwrap();
        let [address, key, base] = <[&str; 3]>::try_from(said.split(' ').collect::<Vec<_>>()).unwrap();
        let bytes = |text: &str| text.split(',').map(|byte| byte.parse().unwrap()).collect();
        Self { child, address: bytes(address), key: bytes(key), base: base.parse().unwrap() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// No test, unless [`Process`] has started it: then it says what a peer needs to know, and serves until it is killed.
#[test]
fn a_process_with_memory() {
    if std::env::var_os(OWNER).is_none() {
        return;
    }
    let side = Side::new(&context(&ucx().unwrap(), "tcp"), pattern);
    let text = |bytes: Vec<u8>| bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(",");
    let (address, key) = (text(side.worker.address().unwrap()), text(side.mapped.key().unwrap()));
    println!("\nowner {address} {key} {}", side.bytes.address());
    loop {
        side.worker.progress();
        std::thread::yield_now();
    }
}

#[test]
fn a_peer_that_is_killed_is_told_and_requests_fail() {
    let Some(ucx) = ucx() else { return };
    let here = Side::new(&context(&ucx, "tcp"), |_| 0);
    let there = Process::start();
    let failed = Outcome::default();
    let endpoint =
        Endpoint::connect(&here.worker, &there.address, ErrorHandling::Peer, failed.finished()).unwrap();
    let key = endpoint.unpack(&there.key).unwrap();
    let piece = Piece { local_offset: 0, remote_address: there.base, len: 4096 };
    run([&here, &here], &key, |batch| batch.get(piece)).unwrap();
    assert_eq!(here.bytes.copy()[4095], pattern(4095));
    drop(there);
    let error = run([&here, &here], &key, |batch| batch.get(piece)).unwrap_err();
    assert!(error.is_of_peer(), "{error}");
    until([&here, &here], || failed.is_there());
    assert!(failed.take().unwrap_err().is_of_peer());
}

#[test]
fn a_worker_wakes_whoever_sleeps_on_its_file() {
    let Some(ucx) = ucx() else { return };
    let context = context(&ucx, "tcp");
    let (here, there) = (Side::new(&context, |_| 0), Side::new(&context, |_| 1));
    let (endpoint, _failed) = here.connect(&there, ErrorHandling::Peer);
    let key = endpoint.unpack(&there.mapped.key().unwrap()).unwrap();
    run([&here, &there], &key, |batch| batch.get(piece(&there, 0, 0, 4096))).unwrap();
    while !there.worker.arm().unwrap() {
        there.worker.progress();
    }
    let outcome = Outcome::default();
    let batch = Batch::between(Arc::clone(&here.mapped), key, outcome.finished());
    batch.get(piece(&there, 0, 0, 4096));
    drop(batch);
    let file = there.worker.event_fd().unwrap();
    let mut files = [PollFd::from_borrowed_fd(file, PollFlags::IN)];
    let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let (end, mut woken) = (Instant::now() + PATIENCE, false);
    while !outcome.is_there() {
        assert!(Instant::now() < end, "nobody was woken");
        here.worker.progress();
        if woken || poll(&mut files, Some(&millisecond)).unwrap() > 0 {
            woken = true;
            there.worker.progress();
        }
    }
    outcome.take().unwrap();
}

#[test]
fn values_that_dont_exist_are_refused() {
    let Some(ucx) = ucx() else { return };
    let mut settings = Settings::read(&ucx).unwrap();
    assert_eq!(settings.set("PROTO_ENABLE", "perhaps").unwrap_err().call, "ucp_config_modify");
    assert!(settings.set("TL\0S", "tcp").is_err());
    settings.set("TLS", "no_such_transport").unwrap();
    assert_eq!(Context::new(&settings, "towline-test").unwrap_err().call, "ucp_init");
}
