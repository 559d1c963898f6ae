//! The flags, as data: what `--help`, `docs/cli.md`, the configuration file and the environment are derived from.
//!
//! An argument is declared once, here. Its variable (`TOWLINE_WORKER_THREADS`) and its key in the file (`threads`
//! in `[worker]`) follow from its name in `config.rs`, so there is nothing to keep in step. Types that read a flag's
//! text are in `value.rs`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use towline_fabric::UcxConfig;
use towline_router::WorkerUrl;

use crate::bench::BenchArgs;
use crate::value::{ByteSize, gb_per_s, listen_address, temperature, top_p};

const ABOUT: &str = "\
Prefill computes the KV cache, decode pulls it across; Towline is the line between them.

A request is computed by a prefill worker, which keeps its KV cache under a lease; a decode worker pulls the blocks over \
shared memory or TCP, checks them, and writes the answer. Each transfer leaves a receipt: which wire, how many bytes, \
how fast, and what proves it.";

const AFTER: &str = "\
Try it (a prefill worker, a decode worker and a router, here):
  towline up --model MODEL.gguf
  towline up --model MODEL.gguf --prompt 'Why is the sky blue?'

The same by hand, on one machine or several; all workers share a key:
  export TOWLINE_CLUSTER_KEY=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
  towline worker --role prefill --model MODEL.gguf --listen 127.0.0.1:8100
  towline worker --role decode  --model MODEL.gguf --listen 127.0.0.1:8200
  towline router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Every flag is also a variable (TOWLINE_WORKER_THREADS) and a key of the configuration file
(threads, in [worker]). Flag wins over variable, variable over file, file over default.

Exit codes: 0 fine, 1 findings, 2 usage or failure, 3 could not tell.";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "towline", version, about = ABOUT, after_help = AFTER, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) action: Action,
}

/// What every subcommand takes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Global {
    /// Configuration file, TOML; without it, towline.toml in the working directory if there is one
    #[arg(long, global = true, display_order = 900, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Output and logs: lines for people, or one JSON object a line
    #[arg(
        long,
        global = true,
        display_order = 900,
        value_name = "FORMAT",
        value_enum,
        default_value = "human"
    )]
    pub(crate) format: Format,
    /// Which logs to write, on standard error: a level, or target=level pairs
    #[arg(long, global = true, display_order = 900, value_name = "FILTER", default_value = LOG_DEFAULT)]
    pub(crate) log: String,
}

/// The default of `--log`.
pub(crate) const LOG_DEFAULT: &str = "info";

/// Lines for people, or JSON for programs, an object a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Human,
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Start a prefill worker, a decode worker and a router here, as separate processes
    Up(UpArgs),
    /// Start one worker: an engine behind OpenAI-compatible HTTP
    Worker(WorkerArgs),
    /// Start the router: one OpenAI-compatible address in front of the workers
    Router(RouterArgs),
    /// Measure: each figure beside what this machine can do at most
    Bench(BenchArgs),
}

/// `towline up`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Address of the router; when the port is taken, another one is used and named
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// Start one worker that does both phases, instead of a prefill and a decode worker
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set,
          default_value = "false", default_missing_value = "true")]
    pub(crate) aggregated: bool,
    /// Send this one request, print its answer, stop everything and exit
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// With --prompt: most tokens to generate
    #[arg(long, value_name = "N", default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// With --prompt: send the text as it stands, without the model's chat template
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set,
          default_value = "false", default_missing_value = "true")]
    pub(crate) raw: bool,
    /// Longest time for all processes to be ready, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) start_seconds: u64,
}

/// `towline worker`.
#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerArgs {
    /// Which phase of a request this worker computes
    #[arg(long, value_name = "ROLE", value_enum)]
    pub(crate) role: Role,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Address of the HTTP API; port 0 takes a free one and prints it
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8100", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// Address where other workers reach this one's KV; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", value_parser = listen_address)]
    pub(crate) kv_listen: SocketAddr,
    /// What other workers dial for this one's KV, when it isn't the address of --kv-listen
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) kv_advertise: Option<String>,
    /// Folder for the sockets by which workers of one host find each other's memory; mount it into every container
    /// that should be reached. Without it, any worker of the same network namespace is
    #[arg(long, value_name = "DIR")]
    pub(crate) shm_dir: Option<PathBuf>,
    /// Threads that copy KV out of shared memory
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) copy_threads: u8,
    /// TCP streams to each worker that large pulls are spread over, and threads that serve them
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) tcp_streams: u8,
    /// Longest pull of a request's KV, connecting included, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) pull_seconds: u64,
    /// Name of this worker in receipts and logs; without it, its role and random digits
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// File to which a line of JSON is appended for each transfer of KV that this worker asked for: receipt or error
    #[arg(long, value_name = "FILE")]
    pub(crate) transfer_log: Option<PathBuf>,
    /// Most requests under way, waiting ones included; more are answered 503
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_requests: u32,
    /// File with the cluster's key, 64 hexadecimal digits; or give the key in TOWLINE_CLUSTER_KEY
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_key_file: Option<PathBuf>,
    /// Name of the deployment: a ticket for one deployment is refused in another
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) deployment: String,
    #[command(flatten)]
    pub(crate) stop: StopArgs,
}

/// `towline router`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RouterArgs {
    /// Address of the HTTP API; port 0 takes a free one and prints it
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// A prefill worker; repeatable, or separated by commas
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(crate) prefill: Vec<WorkerUrl>,
    /// A decode worker; repeatable, or separated by commas
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(crate) decode: Vec<WorkerUrl>,
    /// A worker that does both, used when no prefill and decode pair is usable; repeatable, or separated by commas
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(crate) aggregated: Vec<WorkerUrl>,
    /// Send clients' Authorization headers on to the workers
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set,
          default_value = "false", default_missing_value = "true")]
    pub(crate) forward_authorization: bool,
    /// Most requests in flight; more are answered 503
    #[arg(long, value_name = "N", default_value = "4096", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_requests: u32,
    /// Largest request body
    #[arg(long, value_name = "SIZE", default_value = "16MiB")]
    pub(crate) max_body: ByteSize,
    /// Longest prefill leg of a request, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) prefill_seconds: u64,
    /// When the port of --listen is taken, take a free one
    #[arg(long, hide = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set,
          default_value = "false", default_missing_value = "true")]
    pub(crate) any_port: bool,
    #[command(flatten)]
    pub(crate) stop: StopArgs,
}

/// What shapes an engine; `up` hands these on to its workers.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// The model: a GGUF file of the Llama family
    #[arg(long, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// Name of the model in requests; without it, the file's name
    #[arg(long, value_name = "NAME")]
    pub(crate) model_name: Option<String>,
    /// Compute threads of a worker; without it, the machine's cores, shared out between the workers of `up`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Memory for the KV cache of a worker
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    pub(crate) kv_cache: ByteSize,
    /// Tokens in a KV block; the same on all workers
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) block_tokens: u32,
    /// Most sequences computed together
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) max_batch: u32,
    /// Keep the KV of past prompts for prompts that begin alike
    #[arg(long, value_name = "SWITCH", value_enum, default_value = "on")]
    pub(crate) prefix_cache: Switch,
    /// How the KV crosses: auto prefers shm and falls back to tcp
    #[arg(long, value_name = "TRANSPORT", value_enum, default_value = "auto")]
    pub(crate) transport: Transport,
    #[command(flatten)]
    pub(crate) ucx: UcxArgs,
    /// What a decode worker does when the KV can't be fetched
    #[arg(long, value_name = "POLICY", value_enum, default_value = "fail")]
    pub(crate) on_kv_failure: OnKvFailure,
    #[command(flatten)]
    pub(crate) contract: ContractArgs,
    /// How many KV blocks carry a digest that the decode worker checks
    #[arg(long, value_name = "DIGEST", value_enum, default_value = "full")]
    pub(crate) digest: Digest,
    /// Temperature of requests that give none, 0 to 2; small models talk better sense near 0.2
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = temperature)]
    pub(crate) temperature: f32,
    /// Nucleus (top_p) of requests that give none, above 0 to 1
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = top_p)]
    pub(crate) top_p: f32,
    /// How long a prefill worker keeps KV for a decode worker that doesn't come, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) lease_seconds: u64,
}

/// How UCX is opened, where it is asked for. Variables `UCX_…` hold as usual.
#[derive(Args, Clone, Debug)]
pub(crate) struct UcxArgs {
    /// With --transport ucx: UCX's library, libucp; without it, the one that is loaded or that the loader finds
    #[arg(long, value_name = "FILE")]
    pub(crate) ucx_library: Option<PathBuf>,
    /// With --transport ucx: also use what needs no RDMA device (UCX's tcp, which emulates it in software, and shared memory); it
    /// trusts addresses in what peers send
    #[arg(long, value_name = "SWITCH", value_enum, default_value = "off")]
    pub(crate) ucx_software: Switch,
}

impl UcxArgs {
    /// For an agent.
    pub(crate) fn config(&self) -> UcxConfig {
        let (library, software) = (self.ucx_library.clone(), self.ucx_software == Switch::On);
        UcxConfig { library, software, options: Vec::new() }
    }
}

/// What the path of the KV must be.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ContractArgs {
    /// The least that the wire to a prefill worker must be
    #[arg(long, value_name = "PATH", value_enum, default_value = "any")]
    pub(crate) require: Require,
    /// The least rate of the KV from a prefill worker, in GB (10⁹ bytes) a second; 0 asks for none. Judged after three
    /// stretches of at least 4 MiB in a row
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = gb_per_s)]
    pub(crate) min_gb_per_s: f64,
    /// What happens when a path is less than that: not used, or used with a warning, a metric and a mark on each receipt
    #[arg(long, value_name = "POLICY", value_enum, default_value = "refuse")]
    pub(crate) on_violation: OnViolation,
}

/// Kinds of path, each less than the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Require {
    /// Whatever works
    Any,
    /// Shared memory of one host
    SameHost,
    /// Remote direct memory access; no transport of this build offers it
    Rdma,
    /// RDMA to and from device memory; no transport of this build offers it
    GpuDirect,
}

/// What to do about a path that breaks the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnViolation {
    /// Don't use it
    Refuse,
    /// Use it and say so
    Alarm,
}

/// How a process ends.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct StopArgs {
    /// After a stop signal: how long open requests may take to end, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub(crate) drain_seconds: u64,
    /// Stop when standard input closes, so that a child never outlives its parent
    #[arg(long, hide = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, action = ArgAction::Set,
          default_value = "false", default_missing_value = "true")]
    pub(crate) stop_with_parent: bool,
}

/// Phases of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Computes prompts and keeps their KV for a decode worker
    Prefill,
    /// Pulls KV and writes tokens
    Decode,
    /// Does both
    Aggregated,
}

/// Wires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// The best that both ends have
    Auto,
    /// Shared memory of one host
    Shm,
    /// TCP
    Tcp,
    /// UCX, which is opened at run time: RDMA where there are devices
    Ucx,
}

/// Fail the request or compute the prompt again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnKvFailure {
    /// The request fails with a clear error
    Fail,
    /// The decode worker computes the prompt itself
    Recompute,
}

/// How many blocks carry a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Digest {
    /// None: corruption on the way goes unnoticed
    Off,
    /// Every sixteenth and the last
    Sampled,
    /// All
    Full,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}
