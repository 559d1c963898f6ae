//! An owner seen from the initiator: commands sent, answers read one-sided out of its control region.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use towline_fabric::{Agent, ConnectOptions, Memory, Peer, TransferRequest, TransportChoice};
use towline_wire::blocks::BlockList;
use towline_wire::id::RegionId;
use towline_wire::receipt::{Op, TransportKind};

use super::PATIENCE;
use super::message::{self, Answer, CONTROL_BYTES, Command, Order, Outcome};
use super::owner::random;
use super::pattern::WrongByte;

/// First pause between two looks at the control region, and the longest: each is twice the one before.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(20)];

/// Connects to the agent at `address` over one transport.
pub(crate) fn connect(agent: &Agent, address: &str, kind: TransportKind) -> Result<Peer> {
    let transport = TransportChoice::Only(kind);
    let options = ConnectOptions { transport, ..ConnectOptions::default() };
    let patience = options.deadline * 2;
    let connected = agent.connect(address, options).wait(patience);
    connected
        .ok_or_else(|| anyhow!("no answer"))
        .and_then(|peer| peer.map_err(Into::into))
        .with_context(|| format!("can't reach the owner at {address} over {kind}"))
}

/// One owner and the words it takes.
pub(crate) struct Remote {
    pub(crate) peer: Peer,
    page: Arc<Memory>,
    control: RegionId,
    /// Of the last order; starts at random, since an owner serves one run after another.
    number: u64,
}

impl Remote {
    /// Connects, and makes sure that it is one of ours.
    pub(crate) fn connect(agent: &Agent, address: &str, kind: TransportKind) -> Result<Self> {
        let remote = Self::introduce(agent, address, kind)?;
        remote.look()?;
        Ok(remote)
    }

    /// Connects; nothing has been transferred yet.
    pub(crate) fn introduce(agent: &Agent, address: &str, kind: TransportKind) -> Result<Self> {
        let peer = connect(agent, address, kind)?;
        let control = peer.card().fence_region.context("the peer is no `towline bench kv --listen`")?;
        let page = Arc::new(Memory::allocate("bench-answer", CONTROL_BYTES)?);
        Ok(Self { peer, page, control, number: random()? })
    }

    /// The region of the data.
    ///
    /// # Errors
    /// When it has none yet, or one of another size.
    pub(crate) fn data(&self, bytes: u64) -> Result<RegionId> {
        let card = self.peer.card();
        let region = card.kv_region.and_then(|id| card.region(id)).context("the owner shows no memory")?;
        if region.len_bytes != bytes {
            bail!("the owner shows {} bytes, {bytes} were asked for: another sweep?", region.len_bytes);
        }
        Ok(region.id)
    }

    /// Sends a command and waits until it is carried out; what was wrong with the data is a value.
    pub(crate) fn tell(&mut self, command: Command) -> Result<(Answer, Option<WrongByte>)> {
        self.number = self.number.wrapping_add(1);
        let order = Order { number: self.number, command };
        self.peer.notify(serde_json::to_vec(&order)?).context("can't tell the owner")?;
        let answer = self.answer().with_context(|| format!("the owner was told {:?}", order.command))?;
        match answer.outcome.clone() {
            Outcome::Done => Ok((answer, None)),
            Outcome::Wrong(wrong) => Ok((answer, Some(wrong))),
            Outcome::Failed(reason) => bail!("the owner can't go on: {reason}"),
        }
    }

    /// What the control region says now.
    pub(crate) fn look(&self) -> Result<Answer> {
        let whole = || BlockList {
            group: 0,
            bases: vec![0],
            block_bytes: CONTROL_BYTES,
            stride: CONTROL_BYTES,
            indices: vec![0],
        };
        let request = TransferRequest {
            op: Op::Read,
            local: Arc::clone(&self.page),
            local_blocks: whole(),
            remote_region: self.control,
            remote_blocks: whole(),
            lease: None,
            deadline: PATIENCE,
            hold: None,
            notify: None,
        };
        self.peer.transfer(request)?.wait(PATIENCE).context("the control region can't be read")??;
        message::read(&self.page)
    }

    fn answer(&self) -> Result<Answer> {
        let until = Instant::now() + PATIENCE;
        let [mut pause, longest] = PAUSES;
        while self.look()?.number != self.number {
            if Instant::now() > until {
                bail!("no answer within {} s: does it serve another sweep?", PATIENCE.as_secs());
            }
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(longest);
        }
        // The number was written last, so what is read now is whole.
        self.look()
    }
}
