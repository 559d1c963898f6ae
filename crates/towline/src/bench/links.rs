//! The memories of one case, connected: one link for each pair of an owner and an initiator that move data.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use towline_fabric::{Access, Agent, Memory, Peer, Transfer, TransferRequest};
use towline_wire::blocks::{BlockList, Run, runs};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, Receipt};

use super::case::Case;
use super::kv::RankKv;
use super::message::{Command, Contents, Filling};
use super::pairing::{Pair, Pairing};
use super::pattern::{self, Arrival, Seed, WrongByte};
use super::raw::Abroad;
use super::remote::{Remote, connect};
use super::row::median;
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
    /// This side's memory.
    pub(crate) local: Arc<Memory>,
    /// Which owner.
    pub(crate) owner: usize,
    /// What each transfer moves: this side's list, and the owner's.
    parts: Vec<(BlockList, BlockList)>,
}

/// An owner, as the limits want to know it.
pub(crate) struct Far {
    /// Bytes of its memory.
    pub(crate) region_bytes: u64,
    /// Its raw streams, and what opens them.
    pub(crate) flood: Option<(SocketAddr, [u64; 2])>,
    /// Its memory for a process that may read it by address: one whose parent is this one.
    pub(crate) abroad: Option<Abroad>,
}

/// All links of a case.
pub(crate) struct Links {
    case: Case,
    remotes: Vec<Remote>,
    pub(crate) links: Vec<Link>,
    /// The owners, in their order.
    pub(crate) owners: Vec<Far>,
    /// This side's ranks and their memories, when a prompt is re-sharded.
    ranks: Vec<(RankKv, Arc<Memory>)>,
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

/// Memory of this side. Peers could write it, so that the limits may map it a second time.
fn allocate(bytes: u64) -> Result<Arc<Memory>> {
    Ok(Arc::new(Memory::allocate_for("bench-local", bytes, Access::PeersWrite)?))
}

impl Links {
    /// Has the owners prepare, connects, and allocates the local memories.
    pub(crate) fn open(case: &Case, ends: &Ends<'_>) -> Result<Self> {
        let first = ends.agents.first().context("no agent")?;
        let Pairing { contents, ranks, pairs } = Pairing::of(case)?;
        let mut remotes = Vec::new();
        for (address, contents) in ends.addresses.iter().zip(contents.iter()) {
            let mut remote = Remote::connect(first, address, case.transport)?;
            remote.tell(Command::Prepare(contents.clone()))?;
            drop(remote);
            // The card of a new connection shows what was prepared.
            remotes.push(Remote::connect(first, address, case.transport)?);
        }
        ensure!(remotes.len() == contents.len(), "{} owners are needed", contents.len());
        let locals = ranks.iter().map(|rank| allocate(rank.region_bytes().unwrap_or(u64::MAX)));
        let locals = locals.collect::<Result<Vec<_>>>()?;
        let mut links = Vec::new();
        for Pair { initiator, owner, parts } in pairs {
            let remote = remotes.get(owner).context("no such owner")?;
            let peer = match initiator {
                0 => remote.peer.clone(),
                agent => connect(&ends.agents[agent], &ends.addresses[owner], case.transport)?,
            };
            let local = match locals.get(initiator) {
                Some(local) => Arc::clone(local),
                None => allocate(case.shape.span_bytes() * u64::from(case.batch))?,
            };
            let region = remote.data(contents[owner].region_bytes().context("too many bytes")?)?;
            links.push(Link { peer, region, local, owner, parts });
        }
        let owners = remotes.iter().zip(&contents).enumerate();
        let far = |(index, (remote, contents)): (usize, (&Remote, &Contents))| {
            Far::of(remote, contents, (&ends.addresses[index], ends.pids.get(index).copied()))
        };
        let owners = owners.map(far).collect::<Result<Vec<_>>>()?;
        let (ranks, pids) = (ranks.into_iter().zip(locals).collect(), ends.pids.to_vec());
        let mut open = Self { case: *case, remotes, links, owners, ranks, pids, reading: Duration::ZERO };
        open.reading = open.cost_of_reading()?;
        Ok(open)
    }

    /// Fills every source, and poisons every destination.
    pub(crate) fn fill(&mut self, seed: Seed) -> Result<()> {
        let (poison, reshards) = (seed.poison(), self.case.reshard.is_some());
        // All ranks of a prompt hold parts of one whole, memories of pages each something else.
        let of = |index| if reshards { seed } else { seed.part(index) };
        for index in 0..self.remotes.len() {
            let there = match self.case.op {
                Op::Read => Filling::Data(of(index)),
                Op::Write => Filling::Poison(poison),
            };
            self.remotes[index].tell(Command::Fill(there))?;
        }
        for (rank, memory) in &self.ranks {
            if self.case.op == Op::Read { pattern::fill(memory, poison)? } else { rank.fill(memory, seed)? }
        }
        for (index, link) in self.links.iter().enumerate().filter(|_| !reshards) {
            let here = if self.case.op == Op::Read { poison } else { of(index) };
            pattern::fill(&link.local, here)?;
        }
        Ok(())
    }

    /// Checks every destination.
    pub(crate) fn check(&mut self, seed: Seed) -> Result<Option<WrongByte>> {
        let (poison, reshards) = (seed.poison(), self.case.reshard.is_some());
        if self.case.op == Op::Read {
            let ranks = self.ranks.iter().map(|(rank, memory)| rank.check(memory, seed, poison));
            let links = self.links.iter().filter(|_| !reshards).map(|link| self.check_local(link, seed));
            return ranks.chain(links).find_map(Result::transpose).transpose();
        }
        for owner in 0..self.remotes.len() {
            let of_owner = (0..self.links.len()).filter(|index| self.links[*index].owner == owner);
            let seeds = if reshards { vec![seed] } else { of_owner.map(|index| seed.part(index)).collect() };
            if let (_, Some(wrong)) = self.remotes[owner].tell(Command::Check { seeds, poison })? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    fn check_local(&self, link: &Link, seed: Seed) -> Result<Option<WrongByte>> {
        for (destination, source) in &link.parts {
            let (slots, poison) = (self.case.shape.slots, seed.poison());
            let seed = seed.part(link.owner);
            let arrival = Arrival { source, destination, slots, seed, poison };
            if let Some(wrong) = pattern::check(&link.local, &arrival)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    /// What each repetition posts: the index of its link, and the transfer.
    pub(crate) fn requests(&self) -> Vec<(usize, TransferRequest)> {
        let all = self.links.iter().enumerate();
        let all = all.flat_map(|(index, link)| link.parts.iter().map(move |part| (index, link, part)));
        all.map(|(index, link, (local_blocks, remote_blocks))| {
            let request = TransferRequest {
                op: self.case.op,
                local: Arc::clone(&link.local),
                local_blocks: local_blocks.clone(),
                remote_region: link.region,
                remote_blocks: remote_blocks.clone(),
                lease: None,
                deadline: PATIENCE,
                hold: None,
                notify: None,
            };
            (index, request)
        })
        .collect()
    }

    /// Pieces before merging, and what is left when those that touch on both sides are one: of one transfer, or of a
    /// whole re-sharding.
    pub(crate) fn descriptors(&self) -> Result<(u64, u64)> {
        let counted = if self.case.reshard.is_some() { usize::MAX } else { 1 };
        let (mut before, mut after) = (0, 0);
        for (local, remote) in self.links.iter().flat_map(|link| &link.parts).take(counted) {
            before += (remote.bases.len() * remote.indices.len()) as u64;
            after += runs(local, remote, u64::MAX)?.len() as u64;
        }
        Ok((before, after))
    }

    /// What each link moves, as runs of at most `run_bytes_max`: for the limits.
    pub(crate) fn runs(&self, run_bytes_max: u64) -> Result<Vec<Vec<Run>>> {
        let of_link = |link: &Link| {
            let mut all = Vec::new();
            for (local, remote) in &link.parts {
                all.extend(runs(local, remote, run_bytes_max)?);
            }
            Ok(all)
        };
        self.links.iter().map(of_link).collect()
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
        let asked: Vec<u64> = requests.iter().map(|(_, request)| request.remote_blocks.bytes()).collect();
        let after = self.cpu(cpu::Edge::End)?;
        let cpu = spent(before, after).map(|spent| spent.saturating_sub(self.reading));
        for (receipt, size) in receipts.iter().zip(asked.iter().cycle()) {
            ensure!(receipt.bytes == *size, "a receipt says {} bytes of {size}", receipt.bytes);
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

impl Far {
    /// Raw streams are at the agent's host, on the port that the owner told.
    fn of(remote: &Remote, contents: &Contents, (address, pid): (&str, Option<u32>)) -> Result<Self> {
        let answer = remote.look()?;
        let region_bytes = contents.region_bytes().context("too many bytes")?;
        let at = |(port, token): (u16, [u64; 2])| {
            let mut address = address.to_socket_addrs().ok()?.next()?;
            address.set_port(port);
            Some((address, token))
        };
        let flood = answer.flood.and_then(at);
        let abroad = pid.zip(answer.data).map(|(pid, place)| Abroad { pid, place, len: region_bytes });
        Ok(Self { region_bytes, flood, abroad })
    }
}

#[cfg(test)]
mod tests {
    use towline_wire::auth::ClusterKey;
    use towline_wire::receipt::TransportKind;

    use super::*;
    use crate::bench::flags::{Order, Pattern};
    use crate::bench::model::Model;
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
        for (transport, op) in [TransportKind::Shm, TransportKind::Tcp]
            .into_iter()
            .flat_map(|transport| [(transport, Op::Read), (transport, Op::Write)])
        {
            let plain = Case {
                transport,
                op,
                pattern: Pattern::OneToOne,
                peers: 1,
                batch: 2,
                order: Order::Random,
                block_bytes: Some(4096),
                model: None,
                reshard: None,
                shape: Shape::blocks(16 * 4096, 4096, Some(5)).unwrap(),
            };
            for (pattern, peers) in [(Pattern::OneToOne, 1), (Pattern::ManyToOne, 2), (Pattern::OneToMany, 2)]
            {
                let mut case = Case { pattern, peers, ..plain };
                case.shape.lanes = case.lanes();
                cases.push(case);
            }
            let model = Model::find("smollm2-135m").unwrap();
            let bytes = model.block_bytes();
            for words in ["tp3:tp1", "tp1pp2:tp3-nhd"] {
                cases.push(Case {
                    pattern: Pattern::Reshard,
                    peers: 3,
                    batch: 1,
                    block_bytes: Some(bytes),
                    model: Some((model, 96)),
                    reshard: Some(words.parse().unwrap()),
                    shape: Shape::blocks(6 * bytes, bytes, Some(5)).unwrap(),
                    ..plain
                });
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
                let bytes: u64 =
                    links.round(&requests, 1).unwrap().receipts.iter().map(|receipt| receipt.bytes).sum();
                assert_eq!(case.bytes(), bytes, "{case:?}");
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
