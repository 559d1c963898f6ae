//! The memories of one case, connected: one link for each pair of an owner and an initiator.
//!
//! `many-to-one` has one initiating agent and an owner for each link; `one-to-many` has one owner and an agent of this
//! process for each link, whose lanes lie one after the other in the owner's memory.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use towline_fabric::{Agent, Memory, Peer, Transfer, TransferRequest};
use towline_wire::blocks::{BlockList, runs};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, Receipt};

use super::flags::Case;
use super::message::Command;
use super::pattern::{self, Arrival, Seed, WrongByte};
use super::remote::{Remote, connect};
use super::row::median;
use super::shape::Side;
use super::{PATIENCE, cpu};

/// Where the owners are, and what this process initiates with.
pub(crate) struct Ends<'a> {
    pub(crate) agents: &'a [Agent],
    pub(crate) addresses: &'a [String],
    /// Process ids of the owners, when they are ours.
    pub(crate) pids: &'a [u32],
}

/// One initiator's memory and the owner that it moves with.
pub(crate) struct Link {
    peer: Peer,
    region: RegionId,
    /// This side's memory: a lane for each transfer of the batch.
    pub(crate) local: Arc<Memory>,
    /// The first of its lanes in the owner's memory.
    pub(crate) first_lane: u32,
    owner: usize,
}

/// All links of a case.
pub(crate) struct Links {
    case: Case,
    remotes: Vec<Remote>,
    pub(crate) links: Vec<Link>,
    /// Raw streams of the first owner.
    pub(crate) flood: Option<(SocketAddr, [u64; 2])>,
    pids: Vec<u32>,
    /// What reading the processor times costs between two readings.
    reading: Duration,
}

/// Readings with nothing between them, whose median is what a reading costs.
const EMPTY_READINGS: usize = 9;

/// One timed repetition.
pub(crate) struct Round {
    /// From before the first post to after the last completion, divided by the burst.
    pub(crate) elapsed: Duration,
    /// Processor time of all processes, less what reading it costs.
    pub(crate) cpu: Option<Duration>,
    pub(crate) receipts: Vec<Receipt>,
}

impl Links {
    /// Has the owners prepare, connects, and allocates the local memories.
    pub(crate) fn open(case: &Case, ends: &Ends<'_>) -> Result<Self> {
        let region_bytes = case.shape.region_bytes().context("more bytes than 64 bits count")?;
        let first = ends.agents.first().context("no agent")?;
        let mut remotes = Vec::new();
        for address in ends.addresses {
            let mut remote = Remote::connect(first, address, case.transport)?;
            remote.tell(Command::Prepare(case.shape))?;
            drop(remote);
            // The card of a new connection shows what was prepared.
            remotes.push(Remote::connect(first, address, case.transport)?);
        }
        let mut links = Vec::new();
        for index in 0..case.peers as usize {
            let owner = if case.owners() > 1 { index } else { 0 };
            let agent = if case.initiators() > 1 { index } else { 0 };
            let remote = remotes.get(owner).context("no such owner")?;
            let peer = match agent {
                0 => remote.peer.clone(),
                agent => connect(&ends.agents[agent], &ends.addresses[owner], case.transport)?,
            };
            let local_bytes = case.shape.span_bytes() * u64::from(case.batch);
            links.push(Link {
                peer,
                region: remote.data(region_bytes)?,
                local: Arc::new(Memory::allocate("bench-local", local_bytes)?),
                first_lane: if case.initiators() > 1 { u32::try_from(index)? * case.batch } else { 0 },
                owner,
            });
        }
        let flood = flood_of(remotes.first().context("no owner")?, &ends.addresses[0]);
        let pids = ends.pids.to_vec();
        let mut open = Self { case: *case, remotes, links, flood, pids, reading: Duration::ZERO };
        open.reading = open.cost_of_reading()?;
        Ok(open)
    }

    /// Fills every source, and poisons every destination.
    pub(crate) fn fill(&mut self, seed: Seed) -> Result<()> {
        for index in 0..self.remotes.len() {
            let there = if self.case.op == Op::Read { seed.part(index) } else { seed.poison() };
            self.remotes[index].tell(Command::Fill(there))?;
        }
        for (index, link) in self.links.iter().enumerate() {
            let here = if self.case.op == Op::Read { seed.poison() } else { seed.part(index) };
            pattern::fill(&link.local, here)?;
        }
        Ok(())
    }

    /// Checks every destination.
    pub(crate) fn check(&mut self, seed: Seed) -> Result<Option<WrongByte>> {
        if self.case.op == Op::Read {
            let mut wrong = self.links.iter().map(|link| self.check_local(link, seed));
            return wrong.find_map(Result::transpose).transpose();
        }
        for owner in 0..self.remotes.len() {
            let of_owner = (0..self.links.len()).filter(|index| self.links[*index].owner == owner);
            let seeds = of_owner.map(|index| seed.part(index)).collect();
            let command = Command::Check { seeds, poison: seed.poison() };
            if let (_, Some(wrong)) = self.remotes[owner].tell(command)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    fn check_local(&self, link: &Link, seed: Seed) -> Result<Option<WrongByte>> {
        for lane in 0..self.case.batch {
            let (source, destination) = self.lists(link, lane);
            let (slots, poison) = (self.case.shape.slots, seed.poison());
            let seed = seed.part(link.owner);
            let arrival = Arrival { source: &source, destination: &destination, slots, seed, poison };
            if let Some(wrong) = pattern::check(&link.local, &arrival)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    /// The remote and the local list of one transfer.
    fn lists(&self, link: &Link, lane: u32) -> (BlockList, BlockList) {
        let (shape, there) = (self.case.shape, link.first_lane + lane);
        let span = shape.span_bytes();
        (
            shape.list(Side::Remote, there, u64::from(there) * span),
            shape.list(Side::Local, there, u64::from(lane) * span),
        )
    }

    /// What each repetition posts: the index of its link, and the transfer.
    pub(crate) fn requests(&self) -> Vec<(usize, TransferRequest)> {
        let lanes = |index| (0..self.case.batch).map(move |lane| (index, lane));
        let all = (0..self.links.len()).flat_map(lanes);
        all.map(|(index, lane)| {
            let link = &self.links[index];
            let (remote_blocks, local_blocks) = self.lists(link, lane);
            let request = TransferRequest {
                op: self.case.op,
                local: Arc::clone(&link.local),
                local_blocks,
                remote_region: link.region,
                remote_blocks,
                lease: None,
                deadline: PATIENCE,
                hold: None,
                notify: None,
            };
            (index, request)
        })
        .collect()
    }

    /// Pieces of one transfer before merging, and what is left when those that touch on both sides are one.
    pub(crate) fn descriptors(&self) -> Result<(u64, u64)> {
        let link = self.links.first().context("no link")?;
        let (remote, local) = self.lists(link, 0);
        Ok((remote.indices.len() as u64, runs(&local, &remote, u64::MAX)?.len() as u64))
    }

    /// Posts everything and waits for everything, `burst` times in a row, and holds each receipt to what was asked.
    pub(crate) fn round(&mut self, requests: &[(usize, TransferRequest)], burst: u32) -> Result<Round> {
        let mut bursts = vec![requests.to_vec(); burst as usize];
        let mut transfers: Vec<Transfer> = Vec::with_capacity(requests.len());
        let mut receipts = Vec::with_capacity(requests.len() * bursts.len());
        let before = self.cpu(cpu::Edge::Start)?;
        let started = Instant::now();
        for requests in &mut bursts {
            for (index, request) in requests.drain(..) {
                transfers.push(self.links[index].peer.transfer(request)?);
            }
            for mut transfer in transfers.drain(..) {
                receipts.push(transfer.wait(PATIENCE).context("a transfer that doesn't end")??);
            }
        }
        let elapsed = started.elapsed() / burst;
        let after = self.cpu(cpu::Edge::End)?;
        let cpu = spent(before, after).map(|spent| spent.saturating_sub(self.reading));
        for receipt in &receipts {
            let size = self.case.shape.size_bytes();
            ensure!(receipt.bytes == size, "a receipt says {} bytes of {size}", receipt.bytes);
            let asked = (self.case.transport, self.case.op);
            ensure!((receipt.transport, receipt.op) == asked, "a receipt says {receipt:?}, not {asked:?}");
        }
        Ok(Round { elapsed, cpu, receipts })
    }

    fn cost_of_reading(&mut self) -> Result<Duration> {
        let mut costs = Vec::new();
        for _ in 0..EMPTY_READINGS {
            let before = self.cpu(cpu::Edge::Start)?;
            costs.extend(spent(before, self.cpu(cpu::Edge::End)?));
        }
        Ok(median(&costs).unwrap_or_default())
    }

    /// Processor time of this process and of the owners: read from the kernel where they are ours, else asked for.
    fn cpu(&mut self, edge: cpu::Edge) -> Result<Option<Duration>> {
        if edge == cpu::Edge::End {
            let own = cpu::own(edge);
            return Ok(own.zip(self.cpu_of_owners()?).map(|(own, owners)| own + owners));
        }
        let owners = self.cpu_of_owners()?;
        Ok(owners.zip(cpu::own(edge)).map(|(owners, own)| owners + own))
    }

    fn cpu_of_owners(&mut self) -> Result<Option<Duration>> {
        if !self.pids.is_empty() {
            return Ok(self.pids.iter().map(|pid| cpu::of(*pid)).sum());
        }
        let mut total = Some(Duration::ZERO);
        for remote in &mut self.remotes {
            let (answer, _) = remote.tell(Command::Mark)?;
            total = total.zip(answer.cpu).map(|(total, cpu)| total + cpu);
        }
        Ok(total)
    }
}

fn spent(before: Option<Duration>, after: Option<Duration>) -> Option<Duration> {
    before.zip(after).map(|(before, after)| after.saturating_sub(before))
}

/// Where an owner's raw streams are: its agent's host, and the port that it told.
fn flood_of(remote: &Remote, address: &str) -> Option<(SocketAddr, [u64; 2])> {
    let (port, token) = remote.look().ok()?.flood?;
    let mut address = address.to_socket_addrs().ok()?.next()?;
    address.set_port(port);
    Some((address, token))
}

#[cfg(test)]
mod tests {
    use towline_wire::auth::ClusterKey;
    use towline_wire::receipt::TransportKind;

    use super::*;
    use crate::bench::flags::{Order, Pattern};
    use crate::bench::owner::{Deaf, Serving, Threads, agent_config};
    use crate::bench::shape::Shape;

    const KEY: [u8; 32] = [7; 32];

    /// Owners and initiators of this process, with two transfers of 16 pages for each pair.
    fn with_links(case: Case, test: impl Fn(&mut Links)) {
        let key = || ClusterKey::from_bytes(KEY);
        let owners: Vec<Serving> = (0..case.owners())
            .map(|_| {
                Serving::start(agent_config("owner", key(), Threads { copy: 1, streams: 2 }).unwrap())
                    .unwrap()
            })
            .collect();
        let addresses: Vec<String> = owners.iter().map(|owner| owner.agent.address().to_owned()).collect();
        let start = |_| {
            Agent::start(
                agent_config("initiator", key(), Threads { copy: 1, streams: 2 }).unwrap(),
                Arc::new(Deaf),
            )
            .unwrap()
        };
        let agents: Vec<Agent> = (0..case.initiators()).map(start).collect();
        let ends = Ends { agents: &agents, addresses: &addresses, pids: &[] };
        test(&mut Links::open(&case, &ends).unwrap());
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for transport in [TransportKind::Shm, TransportKind::Tcp] {
            for op in [Op::Read, Op::Write] {
                for (pattern, peers) in
                    [(Pattern::OneToOne, 1), (Pattern::ManyToOne, 2), (Pattern::OneToMany, 2)]
                {
                    let shape = Shape::blocks(16 * 4096, 4096, Some(5)).unwrap();
                    let (batch, order, block_bytes, model) = (2, Order::Random, Some(4096), None);
                    let mut case =
                        Case { transport, op, pattern, peers, batch, order, block_bytes, model, shape };
                    case.shape.lanes = case.lanes();
                    cases.push(case);
                }
            }
        }
        cases
    }

    #[test]
    fn what_moved_passes_and_what_did_not_is_found() {
        for case in cases() {
            with_links(case, |links| {
                links.fill(Seed(1)).unwrap();
                let nothing = links.check(Seed(1)).unwrap().unwrap();
                assert!(nothing.missing, "{case:?}: {nothing}");
                let requests = links.requests();
                assert_eq!(links.round(&requests, 1).unwrap().receipts.len(), 2 * case.peers as usize);
                assert_eq!(links.check(Seed(1)).unwrap(), None, "{case:?}");
                assert!(links.check(Seed(2)).unwrap().is_some(), "{case:?}: another source is told apart");
            });
        }
    }

    #[test]
    fn one_transfer_too_few_is_found() {
        for case in cases() {
            with_links(case, |links| {
                links.fill(Seed(1)).unwrap();
                let mut requests = links.requests();
                requests.pop();
                links.round(&requests, 1).unwrap();
                assert!(links.check(Seed(1)).unwrap().unwrap().missing, "{case:?}");
            });
        }
    }

    #[test]
    fn blocks_that_change_places_are_found() {
        for case in cases() {
            with_links(case, |links| {
                links.fill(Seed(1)).unwrap();
                let mut requests = links.requests();
                requests.last_mut().unwrap().1.remote_blocks.indices.swap(3, 4);
                links.round(&requests, 1).unwrap();
                let wrong = links.check(Seed(1)).unwrap().unwrap();
                assert!(!wrong.missing, "{case:?}: {wrong}");
            });
        }
    }
}
