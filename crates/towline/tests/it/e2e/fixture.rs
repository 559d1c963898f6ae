//! A folder with a tiny model in it, and deployments that serve it.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;
use towline_worker::testing::TinyModel;

use crate::process::{Process, finish, towline};

/// A folder with a tiny model in it.
pub(crate) struct Bench {
    folder: TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let bench = Self { folder: TempDir::new().unwrap() };
        bench.write_model("tiny.gguf", 1);
        bench
    }

    /// A model of the same shape, with the weights of `seed`.
    pub(crate) fn write_model(&self, name: &str, seed: u64) {
        TinyModel { seed, ..TinyModel::default() }.write(&self.folder.path().join(name)).unwrap();
    }

    pub(crate) fn model(&self) -> PathBuf {
        self.folder.path().join("tiny.gguf")
    }

    /// `towline` with these words, in this folder.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        towline(args, self.folder.path())
    }

    /// `towline up` with the tiny model, a small cache and one thread a worker.
    pub(crate) fn up(&self, args: &[&str]) -> Process {
        Process::start(self.up_command(args))
    }

    /// One `up --prompt --format json`: its JSON.
    pub(crate) fn ask(&self, prompt: &str, args: &[&str]) -> Value {
        let mut command = self.up_command(args);
        command.args(["--prompt", prompt, "--format", "json"]);
        answer(&finish(command))
    }

    pub(crate) fn up_command(&self, args: &[&str]) -> Command {
        let small = ["--kv-cache=32MiB", "--threads=1", "--listen=127.0.0.1:0"];
        let given = |flag: &str| args.iter().any(|arg| arg.split('=').next() == flag.split('=').next());
        let mut command = self.command(&["up"]);
        command.arg("--model").arg(self.model());
        command.args(small.iter().filter(|flag| !given(flag))).args(args);
        command
    }
}

/// The one JSON object on standard output of a run that must succeed.
pub(crate) fn answer(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let text = std::str::from_utf8(&output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "one line on standard output: {text}");
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}\n{said}"))
}
