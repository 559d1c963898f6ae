//! One child process of `up`: started with its ends tied to ours, stopped by a closed pipe.
//!
//! Its standard input is a pipe that nobody writes to: closing it asks the child to stop, and the kernel closes it if
//! `up` is killed. Its standard output carries the ready line, its standard error the logs (`ears`).

use std::ffi::{OsStr, OsString};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::{ChildStdin, Command};
use tokio::sync::mpsc::Sender;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::ears::{Ears, Ending, Event, Pipe, Tail};
use crate::cli::Format;

/// How long the pipes of a child that ended may stay open (a grandchild could hold them).
const PIPE_GRACE: Duration = Duration::from_secs(1);

/// How a child is started.
pub(crate) struct Launch<'a> {
    /// What it is called: `prefill`, `decode`, `aggregated`, `router`.
    pub(crate) name: &'static str,
    pub(crate) args: Vec<OsString>,
    /// The cluster's key, given through the environment: arguments are for everyone to see.
    pub(crate) key: Option<&'a str>,
    /// Show its warnings and errors only.
    pub(crate) quiet: bool,
    pub(crate) format: Format,
}

/// A running child.
pub(crate) struct Child {
    pub(crate) name: &'static str,
    stdin: Option<ChildStdin>,
    kill: CancellationToken,
}

impl Child {
    /// Starts this binary again. What it says, and its end, arrive in `events`.
    pub(crate) fn start(launch: Launch<'_>, events: Sender<Event>) -> Result<Self> {
        let name = launch.name;
        let binary = std::env::current_exe().context("can't find this binary")?;
        let mut command = Command::new(binary);
        // A group of its own: Ctrl-C reaches `up` alone, which then stops its children in order.
        command.args(&launch.args).process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (variable, _) in std::env::vars_os().filter(|(name, _)| is_setting(name)) {
            command.env_remove(variable);
        }
        if let Some(key) = launch.key {
            command.env(crate::worker::KEY_VARIABLE, key);
        }
        let mut process = command.spawn().with_context(|| format!("can't start the {name} process"))?;
        let stdin = process.stdin.take();
        let stdout = process.stdout.take().context("no standard output")?;
        let stderr = process.stderr.take().context("no standard error")?;
        let tail = Tail::default();
        let ears = Ears {
            name,
            quiet: launch.quiet,
            format: launch.format,
            tail: tail.clone(),
            events: events.clone(),
        };
        let readers = vec![ears.clone().hear(stdout, Pipe::Out), ears.hear(stderr, Pipe::Err)];
        let kill = CancellationToken::new();
        let reaper = Reaper { name, kill: kill.clone(), readers, tail, events };
        tokio::spawn(reaper.run(process));
        Ok(Self { name, stdin, kill })
    }

    /// Asks it to stop: finish open requests and end.
    pub(crate) fn ask_to_stop(&mut self) {
        self.stdin = None;
    }

    /// Ends it by SIGKILL.
    pub(crate) fn kill(&self) {
        self.kill.cancel();
    }
}

/// Variables that would set a child's flags behind `up`'s back.
pub(crate) fn is_setting(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with("TOWLINE_"))
}

/// Waits for the end of a child and tells it, after all that the child said.
struct Reaper {
    name: &'static str,
    kill: CancellationToken,
    readers: Vec<JoinHandle<()>>,
    tail: Tail,
    events: Sender<Event>,
}

impl Reaper {
    async fn run(self, mut process: tokio::process::Child) {
        let status = tokio::select! {
            status = process.wait() => status,
            () = self.kill.cancelled() => {
                let _ = process.start_kill(); // it may have just ended
                process.wait().await
            }
        };
        let drained = async {
            for reader in self.readers {
                let _ = reader.await;
            }
        };
        let _ = tokio::time::timeout(PIPE_GRACE, drained).await;
        let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        let ending = Ending { status, tail: self.tail.lines() };
        let _ = self.events.send(Event::Ended(self.name, ending)).await; // `up` may have gone
    }
}
