//! The processes of `up` as one thing: started in order, heard together, stopped in reverse.
//!
//! One that ends takes the others with it: a deployment with a missing part would fail requests one by one instead.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgMatches, Args, Command};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, timeout_at};
use towline_wire::auth::ClusterKey;

use super::child::{Child, Launch};
use super::ears::{Ending, Event, Ready};
use super::http;
use super::report::Reporter;
use crate::cli::{EngineArgs, Global, LOG_DEFAULT, UpArgs};
use crate::worker;

/// Lines of children waiting to be read: past it, a child that logs without end waits.
const EVENTS_MAX: usize = 1024;
/// How long a child may take to finish its open requests.
const DRAIN_SECONDS: u64 = 3;
/// How long a child that was asked to stop may take to end, before it is killed: its drain and a margin.
const STOP_BOUND: Duration = Duration::from_secs(DRAIN_SECONDS + 3);

/// Where things are, once all are ready.
#[derive(Debug)]
pub(crate) struct Started {
    /// Base URL of the router.
    pub(crate) http: String,
    /// Base URLs of the workers that compute prompts and write tokens.
    pub(crate) workers: Workers,
    /// The model's name in requests.
    pub(crate) model: String,
}

/// The workers' base URLs.
#[derive(Debug)]
pub(crate) enum Workers {
    Pair { prefill: String, decode: String },
    Aggregated(String),
}

/// The processes.
pub(crate) struct Deployment {
    children: Vec<Child>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    plan: Plan,
}

/// What is to be started.
struct Plan {
    global: Global,
    engine: Vec<OsString>,
    key: ClusterKey,
    listen: SocketAddr,
    aggregated: bool,
    patience: Duration,
}

impl Deployment {
    /// Nothing started yet.
    pub(crate) fn new(global: &Global, args: &UpArgs, matches: &ArgMatches) -> Result<Self> {
        if !args.engine.model.is_file() {
            bail!(
                "no model at {}: `make model` fetches one and prints its path",
                args.engine.model.display()
            );
        }
        let (sender, events) = channel(EVENTS_MAX);
        let plan = Plan {
            global: global.clone(),
            engine: engine_flags(args, matches)?,
            key: worker::random_key()?,
            listen: args.listen,
            aggregated: args.aggregated,
            patience: Duration::from_secs(args.start_seconds),
        };
        Ok(Self { children: Vec::new(), sender, events, plan })
    }

    /// Starts the workers side by side, then the router in front of them.
    pub(crate) async fn start(&mut self, reporter: &Reporter) -> Result<Started> {
        let deadline = Instant::now() + self.plan.patience;
        let roles: &[&'static str] =
            if self.plan.aggregated { &["aggregated"] } else { &["prefill", "decode"] };
        for role in roles {
            self.spawn(role, self.plan.worker_args(role))?;
        }
        let mut urls = self.ready(roles, deadline, reporter).await?;
        let model = http::first_model(&urls[0]).await.context("can't ask a worker for its model")?;
        let flags = roles.iter().zip(&urls).map(|(role, url)| format!("--{role}={url}").into());
        let router_args = self.plan.router_args(flags.collect());
        self.spawn("router", router_args)?;
        let router = self.ready(&["router"], deadline, reporter).await?.remove(0);
        reporter.loaded();
        let last = urls.pop().context("no worker")?;
        let workers = match urls.pop() {
            Some(prefill) => Workers::Pair { prefill, decode: last },
            None => Workers::Aggregated(last),
        };
        Ok(Started { http: router, workers, model })
    }

    fn spawn(&mut self, name: &'static str, args: Vec<OsString>) -> Result<()> {
        let key = self.plan.key.to_hex();
        let quiet = self.plan.global.log == LOG_DEFAULT;
        let key = (name != "router").then_some(key.as_str());
        let launch = Launch { name, args, key, quiet, format: self.plan.global.format };
        self.children.push(Child::start(launch, self.sender.clone())?);
        Ok(())
    }

    /// Waits for the ready lines of `names`; their URLs, in that order.
    async fn ready(
        &mut self,
        names: &[&'static str],
        deadline: Instant,
        reporter: &Reporter,
    ) -> Result<Vec<String>> {
        let mut urls = vec![None; names.len()];
        while urls.contains(&None) {
            let event = timeout_at(deadline, self.next()).await;
            match event.map_err(|_| self.plan.too_slow(names, &urls))?? {
                Event::Ready(name, Ready { http }) => {
                    if let Some(slot) = names.iter().position(|known| *known == name) {
                        urls[slot] = Some(http);
                    }
                }
                Event::Progress(name, progress) => reporter.progress(name, &progress),
                Event::Log(line) => reporter.log(&line),
                _ => {}
            }
        }
        Ok(urls.into_iter().flatten().collect())
    }

    /// What a child says next.
    ///
    /// # Errors
    /// When one has ended.
    pub(crate) async fn next(&mut self) -> Result<Event> {
        match self.events.recv().await {
            Some(Event::Ended(name, ending)) => {
                self.children.retain(|child| child.name != name);
                Err(obituary(name, &ending))
            }
            Some(event) => Ok(event),
            None => bail!("lost touch with the children"),
        }
    }

    /// Stops the router, then the workers: nothing is sent to a worker that is gone.
    pub(crate) async fn stop(&mut self) {
        while let Some(mut child) = self.children.pop() {
            child.ask_to_stop();
            let mut others = Vec::new();
            if child.name != "router" {
                others.append(&mut self.children);
                others.iter_mut().for_each(Child::ask_to_stop);
            }
            others.push(child);
            self.await_end(others).await;
        }
    }

    async fn await_end(&mut self, mut children: Vec<Child>) {
        let mut deadline = Instant::now() + STOP_BOUND;
        while !children.is_empty() {
            match timeout_at(deadline, self.events.recv()).await {
                Ok(Some(Event::Ended(name, _))) => {
                    children.retain(|child| child.name != name);
                    self.children.retain(|child| child.name != name);
                }
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(_) => {
                    children.iter().for_each(Child::kill);
                    deadline = Instant::now() + STOP_BOUND;
                }
            }
        }
    }
}

impl Plan {
    fn common(&self) -> Vec<OsString> {
        // An empty file: what `up` was told is all that a child is told.
        let mut args = vec!["--config=/dev/null".into(), "--format=json".into()];
        args.push(format!("--log={}", self.global.log).into());
        args.extend(["--stop-with-parent".into(), format!("--drain-seconds={DRAIN_SECONDS}").into()]);
        args
    }

    fn worker_args(&self, role: &str) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["worker".into(), format!("--role={role}").into()];
        args.extend(self.common());
        args.extend(["--listen=127.0.0.1:0", "--kv-listen=127.0.0.1:0"].map(OsString::from));
        args.extend(self.engine.iter().cloned());
        args
    }

    fn router_args(&self, workers: Vec<OsString>) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["router".into(), format!("--listen={}", self.listen).into()];
        args.push("--any-port".into());
        args.extend(self.common());
        args.extend(workers);
        args
    }

    fn too_slow(&self, names: &[&str], urls: &[Option<String>]) -> anyhow::Error {
        let late: Vec<&str> =
            names.iter().zip(urls).filter(|(_, url)| url.is_none()).map(|(name, _)| *name).collect();
        anyhow!("not ready after {} s (--start-seconds): {}", self.patience.as_secs(), late.join(", "))
    }
}

/// The flags of `EngineArgs` as they were settled for `up`, for its workers.
fn engine_flags(args: &UpArgs, matches: &ArgMatches) -> Result<Vec<OsString>> {
    let known = EngineArgs::augment_args(Command::new("engine"));
    let mut flags = Vec::new();
    for arg in known.get_arguments() {
        let (id, flag) = (arg.get_id().as_str(), arg.get_long().context("not a flag")?);
        for value in matches.get_raw(id).into_iter().flatten() {
            let mut word = OsString::from(format!("--{flag}="));
            word.push(value);
            flags.push(word);
        }
    }
    if args.engine.threads.is_none() {
        flags.push(format!("--threads={}", threads_each(args)).into());
    }
    Ok(flags)
}

/// The machine's cores, shared out between the workers.
fn threads_each(args: &UpArgs) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = if args.aggregated { 1 } else { 2 };
    (cores / workers).max(1)
}

fn obituary(name: &str, ending: &Ending) -> anyhow::Error {
    let what = if name == "router" { "the router".to_owned() } else { format!("the {name} worker") };
    let words = match ending.tail.as_slice() {
        [] => "it said nothing".to_owned(),
        lines => format!("its last lines were\n    {}", lines.join("\n    ")),
    };
    anyhow!("{words}").context(format!("{what} ended ({})", ending.status))
}
