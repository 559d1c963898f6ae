//! A read as a careful reader does it: the data, then the fence, then the digests. And a write.

use std::sync::Arc;
use std::time::Duration;

use towline_fabric::{Memory, Peer, Transfer, TransferError, TransferRequest};
use towline_wire::blocks::BlockList;
use towline_wire::fence::{Fence, SLOT_BYTES};
use towline_wire::receipt::Op;

use super::ends::{self, GOOD, WRONG_BYTES};
use super::pool::{BLOCK, BLOCKS, BYTES, Lent, SENT, fill};
use super::scene::{SEEDS, Scene};
use crate::support::*;

/// A transfer of the whole pool: what the owner lends, or what it is sent.
pub(super) struct Reading {
    pub(super) transfer: Transfer,
    pub(super) lent: Arc<Lent>,
}

impl Scene {
    pub(super) fn leased(&self, local: &Arc<Memory>, blocks: (BlockList, BlockList)) -> TransferRequest {
        TransferRequest { lease: Some(LEASE), ..request(Op::Read, local, self.owner.kv, blocks) }
    }

    /// A read of everything that is lent, made into what the state wants by `shape`.
    pub(super) fn post(
        &self,
        peer: &Peer,
        shape: impl FnOnce(TransferRequest) -> TransferRequest,
    ) -> Result<Reading, TransferError> {
        let lent = self.pool.lend();
        let lists = (lent.list(), blocks(BLOCK, 0..BLOCKS));
        let request = TransferRequest { hold: Some(lent.hold()), ..self.leased(self.pool.memory(), lists) };
        Ok(Reading { transfer: peer.transfer(shape(request))?, lent })
    }

    pub(super) fn post_data(&self, peer: &Peer, deadline: Duration) -> Result<Reading, TransferError> {
        self.post(peer, |request| TransferRequest { deadline, ..request })
    }

    /// A write of the whole pool into the owner's inbox; what arrived is the owner's to say.
    pub(super) fn post_write(&self, peer: &Peer) -> Result<Reading, TransferError> {
        fill(self.pool.memory(), SENT);
        self.post(peer, |request| TransferRequest {
            op: Op::Write,
            remote_region: self.owner.inbox,
            deadline: self.deadline,
            ..request
        })
    }

    pub(super) fn post_fence(&self, peer: &Peer, deadline: Duration) -> Result<Transfer, TransferError> {
        let list = || blocks(SLOT_BYTES, [0]);
        let request = request(Op::Read, &self.landing, self.owner.fences, (list(), list()));
        peer.transfer(TransferRequest { deadline, ..request })
    }

    /// A read from beginning to end.
    pub(super) fn read(&self, peer: &Peer) -> &'static str {
        match self.post_data(peer, self.deadline) {
            Ok(data) => self.end(peer, data),
            Err(error) => ends::of_transfer(&error),
        }
    }

    /// The data of a read that is healthy.
    pub(super) fn arrived(&self, peer: &Peer) -> Arc<Lent> {
        let Reading { mut transfer, lent } = self.post_data(peer, PATIENCE).unwrap();
        transfer.wait(PATIENCE).unwrap().unwrap();
        lent
    }

    /// Waits for the data, then reads the fence, then compares digests.
    pub(super) fn end(&self, peer: &Peer, Reading { mut transfer, lent }: Reading) -> &'static str {
        let outcome = transfer.wait(PATIENCE).expect("an outcome in time");
        let slot = outcome.and_then(|receipt| {
            assert_eq!((receipt.bytes, receipt.transport), (BYTES, self.kind));
            self.post_fence(peer, self.deadline)
        });
        slot.map_or_else(|error| ends::of_transfer(&error), |slot| self.judge(slot, &lent))
    }

    /// What the fence says, once it has arrived, and what the digests say.
    pub(super) fn judge(&self, mut slot: Transfer, lent: &Lent) -> &'static str {
        if let Err(error) = slot.wait(PATIENCE).expect("an outcome in time") {
            return ends::of_transfer(&error);
        }
        let mut bytes = [0; 24];
        self.landing.read_into(0, &mut bytes).unwrap();
        match Fence::decode(&bytes).and_then(|fence| fence.check(LEASE.1, 1)) {
            Err(error) => ends::of_fence(error),
            Ok(()) if self.pool.holds(lent, SEEDS[0]) => GOOD,
            Ok(()) => WRONG_BYTES,
        }
    }
}
