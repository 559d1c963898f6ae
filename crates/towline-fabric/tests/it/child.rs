//! Tests that need a process of their own: this binary, run again with one ignored test.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use towline_fabric::{RegionOptions, TransferError};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, TransportKind};

use crate::support::*;

/// Runs one ignored test of this binary in a process of its own.
pub(crate) fn command(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// Runs one and expects it to pass.
pub(crate) fn passes(test: &str) {
    let output = command(test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

const BYTES: u64 = 8 << 20;

/// Serves a region until its input ends.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_serves() {
    let (owner, _) = start(config("child"));
    let region = owner.register(memory(BYTES), RegionOptions::default()).unwrap();
    region.memory().write_from(0, &pattern(6, BYTES)).unwrap();
    println!("\nserving {} {}", owner.address(), region.id());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// A process that serves until this is dropped.
pub(crate) struct Serving {
    child: Child,
    pub(crate) address: String,
    pub(crate) region: RegionId,
}

impl Serving {
    fn start() -> Self {
        Self::of(command("child::child_serves"))
    }

    /// One that says `serving ADDRESS REGION` when it does.
    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.map(Result::unwrap).find(|line| line.starts_with("serving ")).unwrap();
        let words: Vec<_> = said.split(' ').collect();
        Self { child, address: words[1].into(), region: RegionId(words[2].parse().unwrap()) }
    }

    pub(crate) fn signal(&self, which: Signal) {
        signal(&self.child, which);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal; of a stop it waits until no thread runs any more.
pub(crate) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
    if signal == Signal::STOP {
        eventually("every thread has stopped", || is_stopped(child));
    }
}

fn is_stopped(child: &Child) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap()).all(|stat| {
        let state = stat.rsplit(')').next().unwrap().trim_start();
        state.starts_with('T')
    })
}

#[test]
fn a_stopped_peer_is_a_stall_over_tcp_and_still_readable_over_shm() {
    let serving = Serving::start();
    let (reader, _) = start(config("reader"));
    let [shm, tcp] = KINDS.map(|kind| wait(reader.connect(&serving.address, only(kind))).unwrap());
    serving.signal(Signal::STOP);
    let local = memory(BYTES);
    let read = |deadline| towline_fabric::TransferRequest {
        deadline,
        ..request(Op::Read, &local, serving.region, (blocks(BYTES, [0]), blocks(BYTES, [0])))
    };
    let mut stalled = tcp.transfer(read(Duration::from_millis(300))).unwrap();
    let error = stalled.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    eventually("it drains", || stalled.is_drained());
    let receipt = shm.transfer(read(PATIENCE)).unwrap().wait(PATIENCE).unwrap().unwrap();
    assert_eq!((receipt.bytes, receipt.transport), (BYTES, TransportKind::Shm));
    assert!(contents(&local) == pattern(6, BYTES));
    // The stopped agent answers nobody.
    let options =
        towline_fabric::ConnectOptions { deadline: Duration::from_millis(300), ..Default::default() };
    let error = wait(reader.connect(&serving.address, options)).unwrap_err();
    assert!(matches!(error, towline_fabric::ConnectError::Deadline { .. }), "{error}");
    serving.signal(Signal::CONT);
    assert_eq!(wait(shm.ping()), Ok(()));
}

#[test]
fn a_killed_peer_is_unreachable_at_once() {
    for kind in KINDS {
        let serving = Serving::start();
        let (reader, _) = start(config("reader"));
        let peer = wait(reader.connect(&serving.address, only(kind))).unwrap();
        serving.signal(Signal::STOP);
        let local = memory(BYTES);
        let list = || blocks(BYTES, [0]);
        let mut transfer =
            peer.transfer(request(Op::Read, &local, serving.region, (list(), list()))).unwrap();
        if kind == TransportKind::Tcp {
            assert!(transfer.wait(Duration::from_millis(50)).is_none(), "a stopped peer does not serve");
        }
        serving.signal(Signal::KILL);
        let outcome = transfer.wait(PATIENCE).unwrap();
        match outcome {
            // A copy may end before the loss is noticed, and is then right.
            Ok(_) => assert!(kind == TransportKind::Shm && contents(&local) == pattern(6, BYTES)),
            Err(error) => assert!(matches!(error, TransferError::Unreachable { .. }), "{error}"),
        }
        eventually("the loss is noticed", || !peer.is_open());
        let again = peer.transfer(request(Op::Read, &local, serving.region, (list(), list())));
        assert!(matches!(again, Err(TransferError::Unreachable { .. })));
    }
}
