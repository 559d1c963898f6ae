//! An owner as a child process: this binary, listening on a free loopback port, gone when its parent is.
//!
//! Its standard input is a pipe that nobody writes to: however the parent ends, the kernel closes it, and the child ends.
//! The cluster's key goes through the environment, never through arguments, which everybody can read.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use towline_wire::auth::ClusterKey;

use super::flags::KvArgs;
use towline_fabric::UcxConfig;

use crate::cli::Global;
use crate::{up, worker};

/// How long a child may take to listen: it opens sockets and allocates a page.
const START: Duration = Duration::from_secs(60);

/// A running owner.
pub(crate) struct OwnerProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Where its agent listens.
    pub(crate) address: String,
}

#[derive(Deserialize)]
struct Ready {
    kv: String,
}

impl OwnerProcess {
    /// Starts one and waits until it listens.
    pub(crate) fn start(global: &Global, args: &KvArgs, key: &ClusterKey) -> Result<Self> {
        let binary = std::env::current_exe().context("can't find this binary")?;
        let mut command = Command::new(binary);
        command.args(["bench", "kv", "--listen=127.0.0.1:0", "--stop-with-parent", "--config=/dev/null"]);
        command.args(["--format=json", &format!("--log={}", global.log)]);
        command.arg(format!("--tcp-streams={}", args.tcp_streams));
        if let Some(UcxConfig { library, software, .. }) = args.ucx() {
            command
                .args(["--transport=ucx", if software { "--ucx-software=on" } else { "--ucx-software=off" }]);
            library.iter().for_each(|file| _ = command.arg("--ucx-library").arg(file));
        }
        for (variable, _) in std::env::vars_os().filter(|(name, _)| up::is_setting(name)) {
            command.env_remove(variable);
        }
        command.env(worker::KEY_VARIABLE, key.to_hex());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("can't start the owner process")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let mut process = Self { child, stdin, address: String::new() };
        process.address = heard(stdout.context("no standard output")?)?;
        Ok(process)
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// The address of the ready line.
fn heard(stdout: ChildStdout) -> Result<String> {
    let (sender, lines) = channel();
    let hear = move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        _ = sender.send(read.map(|_| line)); // who waited may have given up
    };
    std::thread::Builder::new().name("owner-ready".into()).spawn(hear).context("can't start a thread")?;
    let line = match lines.recv_timeout(START) {
        Ok(line) => line.context("can't hear the owner process")?,
        Err(_) => bail!("the owner process did not listen within {} s", START.as_secs()),
    };
    let ready: Ready = serde_json::from_str(&line).context("the owner process did not start")?;
    Ok(ready.kv)
}

impl Drop for OwnerProcess {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // It holds nothing that needs an orderly end.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}
