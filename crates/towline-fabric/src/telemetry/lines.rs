//! A record of transfers as JSON lines: one object a transfer, in a file. docs/operate.md lists the fields.
//!
//! **Cost.** For a transfer one push into a bounded queue, and a wake-up (some µs) if the writer sleeps. The writer is a
//! thread of its own, `towline-lines`: it sleeps until there is something to write, makes the text, and writes all lines that
//! wait, up to 64 KiB, in one call. No timers: an idle record costs nothing.
//!
//! **What is lost, is counted.** A full queue drops the line, never blocks the transfer. The first write that fails ends the
//! record: a disk that is full or gone won't be asked again for each transfer.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::{EndedTransfer, Telemetry};
use crate::error::TransferError;

/// Schema number of a line.
const SCHEMA: u32 = 1;

/// Lines that may wait: as many as an agent has transfers in flight by default, which may all end at once. Some 4 MB.
const QUEUE_MAX: usize = 4096;

/// Bytes written at once, or one line if it is longer.
const WRITE_BYTES: usize = 64 * 1024;

/// A [`Telemetry`] that writes a JSON object in a line for each transfer. Dropping it writes what waits, and returns when that
/// is written.
#[derive(Debug)]
pub struct JsonLines {
    /// Taken by the drop, which ends the writer so.
    queue: Option<SyncSender<Box<Line>>>,
    counts: Arc<Counts>,
    writer: Option<JoinHandle<()>>,
}

/// How far a record has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JsonLinesStats {
    /// Lines that were written.
    pub written: u64,
    /// Lines that were not: the queue was full, or a write failed. Each line tells the number as it was then.
    pub dropped: u64,
    /// Whether a write failed: nothing is written any more, and the file's last line may be cut.
    pub stopped: bool,
}

#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    dropped: AtomicU64,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct Line {
    unix_s: f64,
    ended: EndedTransfer,
}

impl JsonLines {
    /// Appends to the file at `path`, and makes it if it isn't there. Lines are written whole, so several processes may append
    /// to one file of a local file system, and it may be truncated meanwhile.
    ///
    /// # Errors
    /// The kernel's: the file can't be opened, or no thread be started.
    pub fn append(path: &Path) -> io::Result<Self> {
        Self::to(OpenOptions::new().append(true).create(true).open(path)?)
    }

    /// Writes to `output`, which may block.
    ///
    /// # Errors
    /// The kernel's, when no thread can be started.
    pub fn to(output: impl Write + Send + 'static) -> io::Result<Self> {
        let (queue, waiting) = sync_channel(QUEUE_MAX);
        let counts = Arc::<Counts>::default();
        let writer = Writer { output, counts: Arc::clone(&counts) };
        let named = std::thread::Builder::new().name("towline-lines".into());
        let writer = named.spawn(move || writer.run(&waiting))?;
        Ok(Self { queue: Some(queue), counts, writer: Some(writer) })
    }

    /// What was written and dropped since it was opened.
    pub fn stats(&self) -> JsonLinesStats {
        JsonLinesStats {
            written: self.counts.written.load(Ordering::Relaxed),
            dropped: self.counts.dropped.load(Ordering::Relaxed),
            stopped: self.counts.stopped.load(Ordering::Relaxed),
        }
    }
}

impl Telemetry for JsonLines {
    fn handle_transfer(&self, ended: EndedTransfer) {
        let line = Box::new(Line { unix_s: unix_now(), ended });
        if self.queue.as_ref().is_none_or(|queue| queue.try_send(line).is_err()) {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for JsonLines {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            // It has nothing that could panic but the output, whose panic it is.
            let _ = writer.join();
        }
    }
}

/// The thread that writes.
struct Writer<W> {
    output: W,
    counts: Arc<Counts>,
}

impl<W: Write> Writer<W> {
    fn run(mut self, waiting: &Receiver<Box<Line>>) {
        let mut text = String::new();
        while let Ok(first) = waiting.recv() {
            text.clear();
            let mut lines = 0;
            for line in std::iter::once(first).chain(waiting.try_iter()) {
                text.push_str(&line.render(self.counts.dropped.load(Ordering::Relaxed)));
                text.push('\n');
                lines += 1;
                if text.len() >= WRITE_BYTES {
                    break;
                }
            }
            if let Err(error) = self.output.write_all(text.as_bytes()).and_then(|()| self.output.flush()) {
                return self.stop(lines, &error, waiting);
            }
            self.counts.written.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Counts what comes from now on.
    fn stop(self, lines: u64, error: &io::Error, waiting: &Receiver<Box<Line>>) {
        tracing::warn!(%error, "the record of transfers can't be written, and ends here");
        self.counts.stopped.store(true, Ordering::Relaxed);
        self.counts.dropped.fetch_add(lines, Ordering::Relaxed);
        while waiting.recv().is_ok() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Line {
    /// Its text, with the number of lines that were dropped before it.
    fn render(&self, dropped: u64) -> String {
        let EndedTransfer { outcome, .. } = &self.ended;
        let mut object = json!({
            "schema": SCHEMA,
            "unix_s": self.unix_s,
            "dropped": dropped,
            "op": self.ended.op,
            "local_agent": self.ended.local_agent.as_str(),
            "remote_agent": self.ended.remote_agent.as_str(),
            "region": self.ended.region.0,
            "lease": self.ended.lease.map(|lease| lease.0),
            "transport": self.ended.transport,
            "bytes": self.ended.bytes,
            "moved_bytes": self.ended.moved_bytes,
            "seconds": self.ended.seconds,
        });
        match outcome {
            Ok(receipt) => object["receipt"] = json!(receipt),
            Err(error) => {
                let (fault, retry) = (error.fault(), error.retry());
                let text = error.to_string();
                object["error"] =
                    json!({ "kind": kind(error), "text": text, "fault": fault, "retry": retry });
            }
        }
        object.to_string()
    }
}

/// One word for an error, which stays when its text changes.
fn kind(error: &TransferError) -> &'static str {
    match error {
        TransferError::Unreachable { .. } => "unreachable",
        TransferError::PeerRestarted { .. } => "peer-restarted",
        TransferError::Stalled { .. } => "stalled",
        TransferError::Expired { .. } => "expired",
        TransferError::LeaseRequired { .. } => "lease-required",
        TransferError::ContractViolation(_) => "contract-violation",
        TransferError::OutOfRange { .. } => "out-of-range",
        TransferError::UnknownRegion { .. } => "unknown-region",
        TransferError::NotWritable { .. } => "not-writable",
        TransferError::Cancelled => "cancelled",
        TransferError::Invalid(_) => "invalid",
        TransferError::NotifyTooLong { .. } => "notify-too-long",
        TransferError::Active => "active",
        TransferError::Busy { .. } => "busy",
        TransferError::Closed { .. } => "closed",
        TransferError::Miscounted { .. } => "miscounted",
    }
}

fn unix_now() -> f64 {
    // A clock before 1970 reads as 1970.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Sender;
    use std::sync::{Mutex, PoisonError};
    use std::time::{Duration, Instant};

    use serde_json::Value;
    use towline_wire::id::{AgentName, RegionId};
    use towline_wire::receipt::Op;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn ended(bytes: u64) -> EndedTransfer {
        EndedTransfer {
            op: Op::Write,
            local_agent: AgentName::new("here").unwrap(),
            remote_agent: AgentName::new("there").unwrap(),
            region: RegionId(3),
            lease: None,
            transport: None,
            bytes,
            moved_bytes: 0,
            seconds: 0.25,
            outcome: Err(TransferError::Cancelled),
        }
    }

    /// Takes what is written, each call only once the test lets it go on.
    struct Gate {
        text: Arc<Mutex<String>>,
        came: Sender<()>,
        go_on: Receiver<io::Result<()>>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.came.send(()).unwrap();
            self.go_on.recv_timeout(PATIENCE).unwrap()?;
            let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
            text.push_str(std::str::from_utf8(bytes).unwrap());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Test {
        lines: JsonLines,
        text: Arc<Mutex<String>>,
        came: Receiver<()>,
        go_on: Sender<io::Result<()>>,
    }

    impl Test {
        fn start() -> Self {
            let text = Arc::default();
            let ((came_to, came), (go_on, go_on_from)) =
                (std::sync::mpsc::channel(), std::sync::mpsc::channel());
            let gate = Gate { text: Arc::clone(&text), came: came_to, go_on: go_on_from };
            Self { lines: JsonLines::to(gate).unwrap(), text, came, go_on }
        }

        fn text(&self) -> Vec<Value> {
            let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        }

        fn wait_for(&self, enough: impl Fn(JsonLinesStats) -> bool) {
            let until = Instant::now() + PATIENCE;
            while !enough(self.lines.stats()) {
                assert!(Instant::now() < until, "never: {:?}", self.lines.stats());
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_full_queue_drops_lines_and_the_next_line_says_how_many() {
        let test = Test::start();
        test.lines.handle_transfer(ended(0));
        test.came.recv_timeout(PATIENCE).unwrap();
        // The writer is at the first line, so the queue is empty.
        let queue = QUEUE_MAX as u64;
        (1..=queue + 7).for_each(|number| test.lines.handle_transfer(ended(number)));
        assert_eq!(test.lines.stats(), JsonLinesStats { written: 0, dropped: 7, stopped: false });
        (0..=queue).for_each(|_| test.go_on.send(Ok(())).unwrap());
        test.wait_for(|stats| stats.written == queue + 1);
        test.lines.handle_transfer(ended(1 << 40));
        test.wait_for(|stats| stats.written == queue + 2);
        let (lines, bytes) = (test.text(), |line: &Value| line["bytes"].as_u64().unwrap());
        assert!(lines.iter().map(bytes).eq((0..=queue).chain([1 << 40])), "in order, and none twice");
        assert_eq!((&lines[0]["dropped"], &lines.last().unwrap()["dropped"]), (&json!(0), &json!(7)));
    }

    #[test]
    fn a_write_that_fails_ends_the_record_and_what_follows_is_counted() {
        let test = Test::start();
        test.go_on.send(Ok(())).unwrap();
        test.lines.handle_transfer(ended(1));
        test.wait_for(|stats| stats.written == 1);
        test.go_on.send(Err(io::Error::other("the disk is gone"))).unwrap();
        test.lines.handle_transfer(ended(2));
        test.wait_for(|stats| stats.stopped);
        (0..10).for_each(|number| test.lines.handle_transfer(ended(number)));
        test.wait_for(|stats| stats.dropped == 11);
        assert_eq!((test.lines.stats().written, test.text().len()), (1, 1));
        assert_eq!(test.came.try_iter().count(), 2, "it isn't asked again");
    }

    #[test]
    fn dropping_it_writes_what_waits() {
        let Test { lines, text, came, go_on } = Test::start();
        (0..100).for_each(|number| lines.handle_transfer(ended(number)));
        came.recv_timeout(PATIENCE).unwrap();
        (0..100).for_each(|_| go_on.send(Ok(())).unwrap());
        drop(lines);
        assert_eq!(text.lock().unwrap().lines().count(), 100);
    }
}
