//! `towline worker`: flags to `towline_worker::serve::WorkerConfig`, one ready line, and a bounded stop.
//!
//! The cluster's key comes from a file or from `TOWLINE_CLUSTER_KEY`, never from a flag (arguments are for everyone to
//! see), and is printed nowhere.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use indicatif::ProgressDrawTarget;
use serde_json::json;
use towline_fabric::{JsonLines, ShmConfig, Telemetry};
use towline_wire::auth::ClusterKey;
use towline_wire::contract::{self, Contract, Requirement};
use towline_wire::digest::DigestMode;
use towline_worker::pool::PrefixCache;
use towline_worker::serve::{self, HttpLimits, Progress, Worker, WorkerConfig};

use crate::cli::{
    ContractArgs, Digest, Format, Global, OnKvFailure, OnViolation, Require, Role, Switch, Transport,
    WorkerArgs,
};
use crate::{logs, out, progress, stop};

/// The variable that holds the cluster's key.
pub(crate) const KEY_VARIABLE: &str = "TOWLINE_CLUSTER_KEY";
/// Threads that carry HTTP: tokens are small, and the cores belong to the engine.
const HTTP_THREADS: usize = 2;

pub(crate) fn run(global: &Global, args: WorkerArgs, matches: &ArgMatches) -> Result<()> {
    let key = cluster_key(&args, matches)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .enable_all()
        .build()
        .context("can't start")?;
    let outcome = runtime.block_on(serve(global.format, args, key));
    runtime.shutdown_background();
    outcome
}

async fn serve(format: Format, args: WorkerArgs, key: ClusterKey) -> Result<()> {
    let drain = Duration::from_secs(args.stop.drain_seconds);
    let token = stop::watch(args.stop.stop_with_parent)?;
    let model = args.engine.model.clone();
    let config = WorkerConfig { telemetry: telemetry(args.transfer_log.as_deref())?, ..config(args, key) };
    let start = tokio::task::spawn_blocking(move || Worker::start(config, progress_to(format)));
    let worker = tokio::select! {
        started = start => started
            .context("the start broke off")?
            .with_context(|| format!("can't start a worker with the model {}", model.display()))?,
        () = token.cancelled() => return Ok(()),
    };
    announce(format, &worker)?;
    let work = async { worker.run(token.clone()).await.context("the worker failed") };
    stop::bounded(work, &token, drain).await
}

fn config(args: WorkerArgs, key: ClusterKey) -> WorkerConfig {
    let engine = args.engine;
    let defaults = WorkerConfig::new(engine.model, key);
    WorkerConfig {
        role: match args.role {
            Role::Prefill => serve::Role::Prefill,
            Role::Decode => serve::Role::Decode,
            Role::Aggregated => serve::Role::Aggregated,
        },
        model_name: engine.model_name,
        listen: args.listen,
        kv_listen: args.kv_listen,
        kv_advertise: args.kv_advertise,
        name: args.name,
        transport: match engine.transport {
            Transport::Auto => serve::Transport::Auto,
            Transport::Shm => serve::Transport::Shm,
            Transport::Tcp => serve::Transport::Tcp,
            Transport::Ucx => serve::Transport::Ucx(engine.ucx.config()),
        },
        shm: args.shm_dir.map_or(ShmConfig::Abstract, ShmConfig::Dir),
        copy_threads: args.copy_threads.into(),
        tcp_streams: args.tcp_streams.into(),
        deployment: args.deployment,
        threads: engine.threads.map_or(defaults.threads, |threads| threads as usize),
        kv_cache_bytes: engine.kv_cache.0,
        block_tokens: engine.block_tokens,
        max_batch: engine.max_batch as usize,
        prefix_cache: match engine.prefix_cache {
            Switch::On => PrefixCache::On,
            Switch::Off => PrefixCache::Off,
        },
        on_kv_failure: match engine.on_kv_failure {
            OnKvFailure::Fail => serve::OnKvFailure::Fail,
            OnKvFailure::Recompute => serve::OnKvFailure::Recompute,
        },
        contract: contract(engine.contract),
        digest: match engine.digest {
            Digest::Off => DigestMode::Off,
            Digest::Sampled => DigestMode::Sampled,
            Digest::Full => DigestMode::Full,
        },
        lease: Duration::from_secs(engine.lease_seconds),
        pull_deadline: Duration::from_secs(args.pull_seconds),
        temperature: engine.temperature,
        top_p: engine.top_p,
        limits: HttpLimits {
            requests: args.max_requests as usize,
            drain: Duration::from_secs(args.stop.drain_seconds),
            ..HttpLimits::default()
        },
        ..defaults
    }
}

/// The record of transfers, if one is wanted.
fn telemetry(file: Option<&Path>) -> Result<Option<Arc<dyn Telemetry>>> {
    let Some(file) = file else { return Ok(None) };
    let lines = JsonLines::append(file);
    let lines = lines.with_context(|| format!("can't write the transfer log {}", file.display()))?;
    Ok(Some(Arc::new(lines)))
}

fn contract(args: ContractArgs) -> Contract {
    Contract {
        require: match args.require {
            Require::Any => Requirement::Any,
            Require::SameHost => Requirement::SameHost,
            Require::Rdma => Requirement::Rdma,
            Require::GpuDirect => Requirement::GpuDirect,
        },
        min_gb_per_s: args.min_gb_per_s,
        on_violation: match args.on_violation {
            OnViolation::Refuse => contract::OnViolation::Refuse,
            OnViolation::Alarm => contract::OnViolation::Alarm,
        },
    }
}

fn cluster_key(args: &WorkerArgs, matches: &ArgMatches) -> Result<ClusterKey> {
    match (given_key(args.cluster_key_file.as_deref(), matches)?, args.role) {
        (Some(key), _) => Ok(key),
        // It talks to no other worker: a key that nobody knows closes its KV port to all.
        (None, Role::Aggregated) => random_key(),
        (None, _) => bail!(
            "a prefill or decode worker needs the cluster's key: give --cluster-key-file FILE or {KEY_VARIABLE}, 64 \
             hexadecimal digits, the same for all workers"
        ),
    }
}

/// The cluster's key, if one was given. A file named on the command line wins over the variable, and the variable over a
/// file named elsewhere.
pub(crate) fn given_key(file: Option<&Path>, matches: &ArgMatches) -> Result<Option<ClusterKey>> {
    let named = matches.value_source("cluster_key_file") == Some(ValueSource::CommandLine);
    let text = std::env::var(KEY_VARIABLE).ok().filter(|_| !named);
    match (text, file) {
        (Some(text), _) => {
            ClusterKey::from_hex(&text).map(Some).with_context(|| format!("in {KEY_VARIABLE}"))
        }
        (None, Some(file)) => read_key(file).map(Some),
        (None, None) => Ok(None),
    }
}

fn read_key(file: &Path) -> Result<ClusterKey> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("can't read the key file {}", file.display()))?;
    ClusterKey::from_hex(&text).with_context(|| format!("in the key file {}", file.display()))
}

/// A key of 32 random bytes.
pub(crate) fn random_key() -> Result<ClusterKey> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|error| anyhow!("no random bytes for a cluster key: {error}"))?;
    Ok(ClusterKey::from_bytes(key))
}

/// Where the start's progress goes: a bar for a person at a terminal, events for `up`, nowhere otherwise.
fn progress_to(format: Format) -> impl Fn(Progress) + Send {
    let bar = progress::bar("worker");
    if format == Format::Human && std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
    move |Progress { step, done, total }| {
        if format == Format::Json {
            tracing::info!(target: logs::PROGRESS, step, done, total);
        }
        bar.set_message(step);
        bar.set_length(total);
        bar.set_position(done);
    }
}

fn announce(format: Format, worker: &Worker) -> Result<()> {
    let http = format!("http://{}", worker.http_addr());
    out::line(&match format {
        Format::Human => format!("listening on {http}"),
        Format::Json => json!({ "event": "listening", "http": http, "kv": worker.kv_address() }).to_string(),
    })
}
