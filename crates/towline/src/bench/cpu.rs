//! Processor time of a process, to the nanosecond as the scheduler counts it.
//!
//! The sum over its threads of the first number of `/proc/PID/task/TID/schedstat`. A thread that is running is counted up
//! to its last tick or sleep only, so the caller is put aside for a moment before its own number is read. Threads that
//! have ended are not in the sum: a difference is right only while the same threads live, as those of an agent do. What
//! reading costs the caller itself is some tens of µs, which `links` measures empty and takes off.

use std::path::Path;
use std::time::Duration;

/// Long enough for the scheduler to put the calling thread aside, and so to count it.
const SETTLE: Duration = Duration::from_micros(100);

/// Which end of a measurement: what the sample itself costs falls outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    Start,
    End,
}

/// Time on a processor of process `pid`; `None` where the kernel doesn't tell.
pub(crate) fn of(pid: u32) -> Option<Duration> {
    threads(&pid.to_string(), "")
}

/// Time on a processor of this process, called on the thread that measures.
pub(crate) fn own(edge: Edge) -> Option<Duration> {
    let link = std::fs::read_link("/proc/thread-self").ok()?;
    let caller = link.file_name()?.to_str()?;
    match edge {
        Edge::Start => {
            let others = threads("self", caller)?;
            std::thread::park_timeout(SETTLE);
            Some(others + thread(Path::new("/proc/thread-self"))?)
        }
        Edge::End => {
            std::thread::park_timeout(SETTLE);
            let here = thread(Path::new("/proc/thread-self"))?;
            Some(here + threads("self", caller)?)
        }
    }
}

/// All threads of a process but one.
fn threads(process: &str, but: &str) -> Option<Duration> {
    let tasks = std::fs::read_dir(Path::new("/proc").join(process).join("task")).ok()?;
    let of_others = tasks.flatten().filter(|task| task.file_name() != but);
    // One that has just ended is not there any more.
    let times: Vec<Duration> = of_others.filter_map(|task| thread(&task.path())).collect();
    (!times.is_empty() || !but.is_empty()).then(|| times.iter().sum())
}

fn thread(folder: &Path) -> Option<Duration> {
    let text = std::fs::read_to_string(folder.join("schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted() {
        let here = || thread(Path::new("/proc/thread-self"));
        let Some(before) = here() else { return }; // a kernel that doesn't tell
        let mut sum = 0_u64;
        for value in 0..3_000_000_u64 {
            sum = std::hint::black_box(sum.wrapping_add(value));
        }
        std::thread::park_timeout(SETTLE);
        assert!(here().unwrap() > before);
        assert!(own(Edge::Start).unwrap() > before && own(Edge::End).unwrap() > before);
    }

    #[test]
    fn processes_that_are_not_there_have_no_time() {
        assert_eq!(of(u32::MAX), None);
    }
}
