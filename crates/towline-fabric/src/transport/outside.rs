//! A transport that the application brought along: it moves bytes like any other, and its word proves nothing.
//!
//! Evidence is what this crate saw itself, of its own mapping or its own socket. Of a transport from outside it saw nothing
//! and only heard: so whatever such a path says of itself counts as what it *could* be
//! ([`EvidenceClass::LibraryCapability`]) at most, which is no proof to a contract, to a receipt, or to who reads one.

use std::sync::Arc;

use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass, TransportKind};

use super::{Capabilities, Opened, Path, PeerAddress, Slice, Transport};
use crate::region::{Access, Memory, RegisterError};

/// See the head of this file.
pub(crate) struct Outside(pub(crate) Arc<dyn Transport>);

impl Transport for Outside {
    fn kind(&self) -> TransportKind {
        self.0.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn unavailable(&self) -> Option<String> {
        self.0.unavailable()
    }

    fn endpoint(&self) -> Option<Vec<u8>> {
        self.0.endpoint()
    }

    fn register(
        &self,
        id: RegionId,
        memory: &Arc<Memory>,
        access: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError> {
        self.0.register(id, memory, access)
    }

    fn deregister(&self, id: RegionId) {
        self.0.deregister(id);
    }

    fn connect(&self, peer: &PeerAddress, opened: Opened) {
        let heard = |path| -> Arc<dyn Path> { Arc::new(Heard(path)) };
        self.0.connect(peer, Box::new(move |path| opened(path.map(heard))));
    }
}

/// A path of such a transport.
struct Heard(Arc<dyn Path>);

impl Path for Heard {
    fn evidence(&self) -> Evidence {
        let class = self.0.evidence().class.min(EvidenceClass::LibraryCapability);
        Evidence { class, source: "claim".into() }
    }

    fn rails(&self) -> Vec<String> {
        self.0.rails()
    }

    fn post(&self, slice: Slice) {
        self.0.post(slice);
    }

    fn close(&self) {
        self.0.close();
    }
}
