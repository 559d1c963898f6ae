//! A second process on the other end, told over its standard input what to do, a line at a time; it answers each line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};

use rustix::process::Signal;

use crate::child;
use crate::support::PATIENCE;

/// A process that runs an ignored test of this binary. Killed when dropped.
pub(super) struct Process {
    child: Child,
    orders: ChildStdin,
    said: Receiver<String>,
}

/// What begins an answer: the test harness prints on the same output.
const ANSWER: &str = "said ";

impl Process {
    /// Starts `test` with `variables`.
    pub(super) fn start(test: &str, variables: &[(&str, String)]) -> Self {
        let mut command = child::command(test);
        command.envs(variables.iter().map(|(name, value)| (*name, value.as_str())));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (say, said) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix(ANSWER) {
                    let _ = say.send(answer.to_owned());
                }
            }
        });
        Self { child, orders, said }
    }

    /// The next answer.
    pub(super) fn answer(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("the other process answers")
    }

    /// Orders something whose answer may come later, or never.
    pub(super) fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// Orders something and waits until it is done.
    pub(super) fn tell(&mut self, order: &str) {
        self.order(order);
        assert_eq!(self.answer(), order);
    }

    pub(super) fn signal(&self, signal: Signal) {
        child::signal(&self.child, signal);
    }

    /// Kills it; returns when nothing of it is left.
    pub(super) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the other process: answers.
pub(super) fn say(answer: &str) {
    let line = format!("\n{ANSWER}{answer}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// In the other process: the orders, until this one wants no more.
pub(super) fn orders() -> impl Iterator<Item = String> {
    std::io::stdin().lines().map_while(Result::ok)
}

/// In the other process: a variable that it was started with.
pub(super) fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}
