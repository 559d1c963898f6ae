//! Workers and a router started by hand, with what a test wants different about them.

use super::fixture::Bench;
use crate::process::Process;

/// A prefill worker, a decode worker and a router in front of them.
pub(crate) struct Cluster {
    pub(crate) prefill: Process,
    pub(crate) decode: Process,
    pub(crate) router: Process,
    pub(crate) prefill_url: String,
    pub(crate) decode_url: String,
    pub(crate) url: String,
}

/// What is different about one worker.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) args: Vec<String>,
    pub(crate) key: String,
    pub(crate) model: &'static str,
}

impl Default for Spec {
    fn default() -> Self {
        Self { args: Vec::new(), key: "5a".repeat(32), model: "tiny.gguf" }
    }
}

impl Spec {
    pub(crate) fn with(args: &[&str]) -> Self {
        Self { args: args.iter().map(|arg| (*arg).to_owned()).collect(), ..Self::default() }
    }
}

impl Cluster {
    pub(crate) fn start(bench: &Bench, prefill: &Spec, decode: &Spec) -> Self {
        let (prefill, decode) = (worker(bench, "prefill", prefill), worker(bench, "decode", decode));
        let (prefill_url, decode_url) = (prefill.address(), decode.address());
        let args = ["router", "--listen=127.0.0.1:0", "--prefill", &prefill_url, "--decode", &decode_url];
        let router = Process::start(bench.command(&args));
        let url = router.address();
        Self { prefill, decode, router, prefill_url, decode_url, url }
    }

    /// What all of them wrote to standard error so far, for a failure's message.
    pub(crate) fn said(&self) -> String {
        let said = [("prefill", &self.prefill), ("decode", &self.decode), ("router", &self.router)];
        said.map(|(name, process)| format!("--- {name}\n{}", process.said())).join("\n")
    }
}

/// One worker of a pair.
pub(crate) fn worker(bench: &Bench, role: &str, spec: &Spec) -> Process {
    let mut command = bench.command(&["worker", "--role", role, "--model", spec.model, "--model-name=tiny"]);
    command.args(["--listen=127.0.0.1:0", "--threads=1", "--kv-cache=32MiB"]).args(&spec.args);
    command.env("TOWLINE_CLUSTER_KEY", &spec.key);
    Process::start(command)
}
