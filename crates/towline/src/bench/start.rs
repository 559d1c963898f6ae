//! How long an agent takes from nothing to its first transfer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use towline_fabric::{Agent, AgentConfig, UcxConfig};
use towline_wire::auth::ClusterKey;
use towline_wire::receipt::TransportKind;

use super::owner::{Deaf, Threads, agent_config};
use super::remote::Remote;
use super::row::median;

/// Agents that are started, one after the other.
const STARTS: usize = 9;

/// Medians over some fresh agents, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Start {
    pub(crate) transport: TransportKind,
    /// Until the agent listens: threads, sockets, transports.
    pub(crate) agent_ms: f64,
    /// From there until a peer is connected over `transport`: authenticated, its card read, its memory reachable.
    pub(crate) connect_ms: f64,
    /// The first transfer, 4 KiB.
    pub(crate) first_ms: f64,
    /// All three.
    pub(crate) total_ms: f64,
    /// The slowest of all.
    pub(crate) total_ms_max: f64,
}

impl Start {
    /// Starts agents that read the control region of the owner at `address`.
    pub(crate) fn measure(
        key: &ClusterKey,
        address: &str,
        (transport, threads, ucx): (TransportKind, Threads, Option<UcxConfig>),
    ) -> Result<Self> {
        let mut times: [Vec<Duration>; 4] = Default::default();
        for _ in 0..STARTS {
            let config = AgentConfig { ucx: ucx.clone(), ..agent_config("starter", key.clone(), threads)? };
            let started = Instant::now();
            let agent = Agent::start(config, Arc::new(Deaf))?;
            let listening = Instant::now();
            let remote = Remote::introduce(&agent, address, transport)?;
            let connected = Instant::now();
            remote.look()?;
            let ended = Instant::now();
            let spans = [listening - started, connected - listening, ended - connected, ended - started];
            times.iter_mut().zip(spans).for_each(|(times, span)| times.push(span));
        }
        let ms = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64() * 1e3;
        let [agent_ms, connect_ms, first_ms, total_ms] = [0, 1, 2, 3].map(|step| ms(median(&times[step])));
        let total_ms_max = ms(times[3].iter().max().copied());
        Ok(Self { transport, agent_ms, connect_ms, first_ms, total_ms, total_ms_max })
    }
}
