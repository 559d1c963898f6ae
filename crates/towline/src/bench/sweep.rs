//! The sweep: each case connected, repeated, checked, and put beside its limit.
//!
//! ```text
//!  a repetition:  fill sources, poison destinations -> [timer: post all, wait for all] -> check every byte -> limit
//!  its limit:     the same, by plain loops and calls
//! ```
//!
//! Small transfers are repeated within the timer, back to back, since one alone would measure the wake-up of a sleeping
//! processor. The limit takes turns with the repetitions, so that whatever else the machine does meets both alike.

use anyhow::{Context, Result, anyhow};
use clap::ArgMatches;
use towline_fabric::{Agent, AgentConfig};
use towline_wire::auth::ClusterKey;
use towline_wire::receipt::TransportKind;

use super::baseline::Baseline;
use super::case::Case;
use super::child::OwnerProcess;
use super::flags::{KvArgs, Verify};
use super::links::{Ends, Links};
use super::owner::{Threads, agent_config, random};
use super::pattern::Seed;
use super::report::Reporter;
use super::row::{Measured, Row};
use super::start::Start;
use super::yardstick::Yardstick;
use super::{chart, machine};
use crate::cli::Global;
use crate::out::Findings;
use crate::worker;

/// Bytes that a repetition moves at least, if that takes no more than [`BURST_MAX`] rounds.
const BURST_BYTES: u64 = 4 << 20;
/// Most rounds of a repetition.
const BURST_MAX: u64 = 100;
/// Most receipts kept of a case: some 30 MB.
const RECEIPTS_MAX: u64 = 100_000;

/// Rounds of a repetition.
fn burst(case: &Case, repeat: u32) -> u32 {
    let receipts = u64::from(repeat) * u64::from(case.batch) * u64::from(case.peers);
    let wanted = BURST_BYTES.div_ceil(case.bytes().max(1)).min(BURST_MAX).min(RECEIPTS_MAX / receipts.max(1));
    u32::try_from(wanted).unwrap_or(1).max(1)
}

/// Measures every case and tells each as soon as it is there.
pub(crate) fn run(global: &Global, args: &KvArgs, matches: &ArgMatches) -> Result<()> {
    let cases = args.cases()?;
    let baseline = args.baseline.as_deref().map(Baseline::read).transpose()?;
    let mut session = Session::start(global, args, matches)?;
    let reporter = Reporter::new(global.format);
    reporter.machine(&machine::Machine::read())?;
    let mut rows = Vec::new();
    for transport in [TransportKind::Shm, TransportKind::Tcp, TransportKind::Ucx] {
        if let Some(case) = cases.iter().find(|case| case.transport == transport) {
            reporter.start(&session.start_of_an_agent(case)?)?;
        }
    }
    reporter.head()?;
    for case in &cases {
        let row = session.measure(case)?;
        reporter.row(&row)?;
        rows.push(row);
    }
    drop(session);
    if let Some(file) = &args.svg {
        std::fs::write(file, chart::draw(&rows))
            .with_context(|| format!("can't write the chart {}", file.display()))?;
    }
    let Some(baseline) = baseline else { return Ok(()) };
    let comparison = baseline.compare(&rows, args.tolerance)?;
    reporter.comparison(&comparison)?;
    match comparison.regressions() {
        0 => Ok(()),
        count => {
            Err(Findings(format!("{count} of {} cases are slower than the baseline", rows.len())).into())
        }
    }
}

/// The processes and agents of a run.
struct Session<'a> {
    global: &'a Global,
    args: &'a KvArgs,
    key: ClusterKey,
    /// Agents that initiate; more are started as patterns need them.
    agents: Vec<Agent>,
    /// Own owner processes; none with --connect.
    children: Vec<OwnerProcess>,
    /// The seed of the last fill: never the same twice.
    seed: u64,
}

impl<'a> Session<'a> {
    fn start(global: &'a Global, args: &'a KvArgs, matches: &ArgMatches) -> Result<Self> {
        let key = if args.connect.is_empty() {
            worker::random_key()?
        } else {
            worker::given_key(args.cluster_key_file.as_deref(), matches)?.ok_or_else(|| {
                anyhow!(
                    "--connect needs the cluster's key: give --cluster-key-file FILE or {}, the one that the process \
                     that listens was given",
                    worker::KEY_VARIABLE
                )
            })?
        };
        Ok(Self { global, args, key, agents: Vec::new(), children: Vec::new(), seed: random()? })
    }

    fn measure(&mut self, case: &Case) -> Result<Row> {
        self.room(case)?;
        self.people(case)?;
        let addresses: Vec<String> = if self.args.connect.is_empty() {
            self.children.iter().take(case.owners() as usize).map(|child| child.address.clone()).collect()
        } else {
            self.args.connect.clone()
        };
        let pids: Vec<u32> =
            self.children.iter().take(case.owners() as usize).map(OwnerProcess::pid).collect();
        let ends = Ends { agents: &self.agents, addresses: &addresses, pids: &pids };
        let mut links = Links::open(case, &ends)?;
        let threads = Threads::of(self.args);
        let mut yardstick = Yardstick::new(case, &links, threads);
        let measured = self.repeat(case, &mut links, &mut yardstick)?;
        Ok(Row::new(case, measured, yardstick.limits(), threads))
    }

    /// How long agents take from their start to their first transfer over the case's wire.
    fn start_of_an_agent(&mut self, case: &Case) -> Result<Start> {
        self.people(case)?;
        let own = self.children.first().map(|child| child.address.clone());
        let address = own.or_else(|| self.args.connect.first().cloned()).context("no owner")?;
        Start::measure(&self.key, &address, (case.transport, Threads::of(self.args), self.args.ucx()))
    }

    /// Agents and owners that the case needs and that aren't there yet.
    fn people(&mut self, case: &Case) -> Result<()> {
        while self.agents.len() < case.initiators() as usize {
            let config = agent_config("initiator", self.key.clone(), Threads::of(self.args))?;
            let config = AgentConfig { ucx: self.args.ucx(), ..config };
            self.agents.push(Agent::start(config, std::sync::Arc::new(super::owner::Deaf))?);
        }
        while self.args.connect.is_empty() && self.children.len() < case.owners() as usize {
            self.children.push(OwnerProcess::start(self.global, self.args, &self.key)?);
        }
        Ok(())
    }

    fn room(&self, case: &Case) -> Result<()> {
        let local = case.memory_bytes();
        let here = if self.args.connect.is_empty() { 2 * local } else { local };
        machine::room_for(here + Yardstick::bytes(case, self.args.connect.is_empty()))
    }

    /// One repetition to warm up, then the timed ones.
    fn repeat(&mut self, case: &Case, links: &mut Links, yardstick: &mut Yardstick) -> Result<Measured> {
        let requests = links.requests();
        let burst = burst(case, self.args.repeat);
        let verified = if self.args.verify == Verify::Full { "full" } else { "off" };
        let descriptors = links.descriptors()?;
        let mut measured = Measured { descriptors, verified, burst, ..Measured::default() };
        let mut cpu = Some(std::time::Duration::ZERO);
        for index in 0..=self.args.repeat {
            if index == 0 {
                links.fill(self.next_seed())?;
            } else {
                self.refill(links)?;
            }
            let round = links.round(&requests, burst)?;
            if self.args.verify == Verify::Full {
                self.verify(case, links)?;
            }
            if index == 0 || Yardstick::is_due(index - 1, self.args.repeat) {
                yardstick.measure(burst, &mut || self.refill(links))?;
            }
            if index > 0 {
                measured.elapsed.push(round.elapsed);
                measured.receipts.extend(round.receipts);
                cpu = cpu.zip(round.cpu).map(|(sum, more)| sum + more);
            } else {
                yardstick.warmed();
            }
        }
        measured.cpu = cpu;
        Ok(measured)
    }

    /// What comes before each round that is timed: new data, and poison where it is to go.
    fn refill(&mut self, links: &mut Links) -> Result<()> {
        if self.args.verify == Verify::Full { links.fill(self.next_seed()) } else { Ok(()) }
    }

    fn next_seed(&mut self) -> Seed {
        self.seed = self.seed.wrapping_add(1);
        Seed(self.seed)
    }

    fn verify(&self, case: &Case, links: &mut Links) -> Result<()> {
        match links.check(Seed(self.seed))? {
            None => Ok(()),
            Some(wrong) => {
                let what = format!("wrong bytes after a {:?} over {}: {wrong}", case.op, case.transport);
                Err(Findings(what).into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use towline_wire::receipt::Op;

    use super::*;
    use crate::bench::flags::{Order, Pattern};
    use crate::bench::shape::Shape;

    #[test]
    fn small_transfers_are_repeated_within_bounds() {
        let of = |size_bytes, repeat| {
            let (transport, op, pattern) = (TransportKind::Shm, Op::Read, Pattern::OneToOne);
            let (order, shape) = (Order::Contiguous, Shape::contiguous(size_bytes));
            let case = Case {
                transport,
                op,
                pattern,
                peers: 1,
                batch: 1,
                order,
                block_bytes: None,
                model: None,
                reshard: None,
                shape,
            };
            burst(&case, repeat)
        };
        assert_eq!((of(4096, 10), of(64 << 10, 10), of(1 << 20, 10), of(256 << 20, 10)), (100, 64, 4, 1));
        assert_eq!((of(4096, 10_000), of(4096, 100_000)), (10, 1));
    }
}
