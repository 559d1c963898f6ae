//! Processes under test: heard with a deadline, watched to their end, gone when their owner is.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Longest wait for anything: loaded machines are slow, and a hang should still end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// `towline` with these words, in this folder, without variables that would change what it does.
pub(crate) fn towline(args: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(args).current_dir(folder);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOWLINE_")) {
        command.env_remove(name);
    }
    command
}

/// Runs a command that ends by itself, in time, with nothing on its standard input.
pub(crate) fn finish(command: Command) -> Output {
    let mut process = Process::start(command);
    let status = process.end();
    let text =
        |lines: &Receiver<String>| lines.iter().map(|line| line + "\n").collect::<String>().into_bytes();
    Output { status, stdout: text(&process.lines), stderr: text(&process.errors) }
}

/// A running `towline`. Its children follow it however it ends.
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    errors: Receiver<String>,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = hear(child.stdout.take().unwrap());
        let errors = hear(child.stderr.take().unwrap());
        Self { child, lines, errors }
    }

    /// The next line on standard output that holds `part`.
    pub(crate) fn line_with(&self, part: &str) -> String {
        next_with(&self.lines, part)
            .unwrap_or_else(|error| panic!("no line with {part:?} ({error}); it said:\n{}", self.said()))
    }

    /// The next line on standard error that holds `part`. A log comes through a pipe: it may arrive after
    /// the answer to the request that it is about.
    pub(crate) fn log_with(&self, part: &str) -> String {
        next_with(&self.errors, part).unwrap_or_else(|error| panic!("no line with {part:?} ({error})"))
    }

    /// Where it takes requests, once it does: `http://127.0.0.1:PORT`.
    pub(crate) fn address(&self) -> String {
        let line = self.line_with("http://");
        let (_, rest) = line.split_once("http://").unwrap();
        format!("http://{}", rest.split([' ', '"', '/']).next().unwrap())
    }

    /// What it wrote to standard error so far.
    pub(crate) fn said(&self) -> String {
        self.errors.try_iter().collect::<Vec<_>>().join("\n")
    }

    /// Everything it wrote to standard error, once it has ended.
    pub(crate) fn said_at_end(&self) -> String {
        self.errors.iter().collect::<Vec<_>>().join("\n")
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for its end.
    pub(crate) fn end(&mut self) -> ExitStatus {
        let gone = Watched::new(self.pid());
        assert!(gone.ends(), "still running; it said:\n{}", self.said());
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// The next line that holds `part`, or why none comes.
fn next_with(lines: &Receiver<String>, part: &str) -> Result<String, RecvTimeoutError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let line = lines.recv_timeout(deadline.saturating_duration_since(Instant::now()))?;
        if line.contains(part) {
            return Ok(line);
        }
    }
}

fn hear(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// A process seen through a pidfd, which no other process can take over.
pub(crate) struct Watched {
    pid: Pid,
    fd: OwnedFd,
}

impl Watched {
    pub(crate) fn new(pid: Pid) -> Self {
        Self { pid, fd: pidfd_open(pid, PidfdFlags::empty()).unwrap() }
    }

    /// The subcommand it runs, and its role: `worker --role=decode`.
    pub(crate) fn what(&self) -> String {
        self.words().into_iter().skip(1).take(2).collect::<Vec<_>>().join(" ")
    }

    /// Its command line.
    pub(crate) fn words(&self) -> Vec<String> {
        let line = std::fs::read(format!("/proc/{}/cmdline", self.pid.as_raw_nonzero())).unwrap_or_default();
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid, signal).unwrap();
    }

    /// Waits for its end; false when it doesn't come in time.
    pub(crate) fn ends(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let patience = Timespec::try_from(PATIENCE).unwrap();
        loop {
            match poll(&mut fds, Some(&patience)) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => panic!("poll: {error}"),
            }
        }
    }
}

/// Asks again and again until it holds: what it waits for happens in another process.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::yield_now();
    }
}

/// The processes whose parent is `pid`.
pub(crate) fn children(pid: Pid) -> Vec<Watched> {
    let parent = format!("PPid:\t{}", pid.as_raw_nonzero());
    let running = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let of_parent = running.filter(|pid: &i32| {
        let status = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status"));
        status.is_ok_and(|status| status.lines().any(|line| line == parent))
    });
    of_parent.filter_map(Pid::from_raw).map(Watched::new).collect()
}
