//! A transport that claims to be another one, with the strongest evidence there is, and sends by TCP: its word proves
//! nothing, and meets no contract that asks for proof.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use towline_fabric::transport::{
    Capabilities, Moved, Opened, Path, PathError, PeerAddress, Slice, Transport,
};
use towline_fabric::{
    Access, Agent, ConnectError, ConnectOptions, Memory, RegionOptions, RegisterError, ShmConfig,
};
use towline_wire::contract::{Contract, OnViolation, Requirement};
use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass, Op, TransportKind};

use crate::support::*;

const BYTES: u64 = 3 << 20;
/// Bytes that both ends of a socket hold between a write and the read after it, by the same thread.
const PIECE: usize = 16 << 10;

/// One liar serves both sides, as they are in one process.
#[derive(Clone)]
struct Liar {
    claims: TransportKind,
    class: EvidenceClass,
    regions: Arc<Mutex<HashMap<RegionId, Arc<Memory>>>>,
    /// What it really sends over.
    wire: Arc<Mutex<(TcpStream, TcpStream)>>,
}

impl Liar {
    fn new(claims: TransportKind, class: EvidenceClass) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        Self { claims, class, regions: Arc::default(), wire: Arc::new(Mutex::new((near, far))) }
    }

    fn agent(&self, name: &str) -> Agent {
        // Without the transport that it passes itself off for.
        let mut config = config(name);
        config.shm = ShmConfig::Off;
        Agent::start_with(config, Arc::new(Book::default()), vec![Arc::new(self.clone())]).unwrap()
    }

    fn carry(&self, slice: &Slice) {
        let remote = Arc::clone(&self.regions.lock().unwrap()[&slice.region()]);
        let mut wire = self.wire.lock().unwrap();
        for run in slice.runs() {
            let mut piece = vec![0; PIECE];
            for at in (0..run.len).step_by(piece.len()) {
                piece.truncate(usize::try_from(run.len - at).unwrap());
                remote.read_into(run.remote + at, &mut piece).unwrap();
                wire.0.write_all(&piece).unwrap();
                piece.fill(0);
                wire.1.read_exact(&mut piece).unwrap();
                slice.local().unwrap().write_from(run.local + at, &piece).unwrap();
            }
        }
    }
}

impl Transport for Liar {
    fn kind(&self) -> TransportKind {
        self.claims
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            device_memory: true,
            checked_by_owner: true,
            ordered: true,
            extents_max: 4096,
        }
    }

    fn endpoint(&self) -> Option<Vec<u8>> {
        Some(Vec::new())
    }

    fn register(
        &self,
        id: RegionId,
        memory: &Arc<Memory>,
        _: Access,
    ) -> Result<Option<Vec<u8>>, RegisterError> {
        self.regions.lock().unwrap().insert(id, Arc::clone(memory));
        Ok(Some(Vec::new()))
    }

    fn deregister(&self, id: RegionId) {
        self.regions.lock().unwrap().remove(&id);
    }

    fn connect(&self, _: &PeerAddress, opened: Opened) {
        opened(Ok(Arc::new(self.clone())));
    }
}

impl Path for Liar {
    fn evidence(&self) -> Evidence {
        Evidence { class: self.class, source: "library".into() }
    }

    fn rails(&self) -> Vec<String> {
        vec!["mlx5_0".into()]
    }

    fn post(&self, slice: Slice) {
        if slice.op() == Op::Write {
            return slice.complete(Err(PathError::Unfit("it only reads".into())));
        }
        self.carry(&slice);
        let bytes = slice.bytes();
        slice.complete(Ok(Moved { bytes, rail: 0 }));
    }

    fn close(&self) {}
}

#[test]
fn a_transport_that_lies_about_its_wire_proves_nothing() {
    for claims in [TransportKind::Shm, TransportKind::Ucx, TransportKind::Libfabric] {
        for class in [EvidenceClass::LibraryExact, EvidenceClass::Counters] {
            let liar = Liar::new(claims, class);
            let (owner, reader) = (liar.agent("owner"), liar.agent("reader"));
            let region = owner.register(memory(BYTES), RegionOptions::default()).unwrap();
            region.memory().write_from(0, &pattern(8, BYTES)).unwrap();
            let peer = wait(reader.connect(owner.address(), only(claims))).unwrap();
            assert!(!peer.evidence().proves(), "{claims}: {}", peer.evidence());
            let local = memory(BYTES);
            let list = || blocks(BYTES, [0]);
            let read = request(Op::Read, &local, region.id(), (list(), list()));
            let receipt = peer.transfer(read).unwrap().wait(PATIENCE).unwrap().unwrap();
            assert!(contents(&local) == pattern(8, BYTES), "the bytes are right all the same");
            assert!(!receipt.evidence.proves(), "{claims}: {}", receipt.evidence);
            assert_eq!(receipt.verified_by, "claim");
        }
    }
}

#[test]
fn a_transport_that_lies_meets_no_contract_that_wants_proof() {
    let wanted = [
        (TransportKind::Shm, Requirement::SameHost),
        (TransportKind::Ucx, Requirement::Rdma),
        (TransportKind::Libfabric, Requirement::GpuDirect),
    ];
    for (claims, require) in wanted {
        let liar = Liar::new(claims, EvidenceClass::LibraryExact);
        let (owner, reader) = (liar.agent("owner"), liar.agent("reader"));
        let contract = |on_violation| Contract { require, on_violation, ..Contract::default() };
        let strict = ConnectOptions { contract: contract(OnViolation::Refuse), ..only(claims) };
        let refused = wait(reader.connect(owner.address(), strict)).unwrap_err();
        assert!(matches!(refused, ConnectError::ContractViolation(_)), "{claims}: {refused}");
        let lenient = ConnectOptions { contract: contract(OnViolation::Alarm), ..only(claims) };
        let peer = wait(reader.connect(owner.address(), lenient)).unwrap();
        assert!(peer.violation().is_some(), "{claims} goes on with an alarm");
    }
}

#[test]
fn what_the_agents_own_transports_saw_is_proof() {
    for kind in KINDS {
        let pair = Pair::over(kind, 4096, RegionOptions::default());
        assert!(pair.peer.evidence().proves(), "{kind}");
    }
}
