//! The protocol spoken by hand over blocking sockets, to say what an agent never would.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

use towline_wire::auth::{
    AUTH_HEAD_BYTES, CHALLENGE_BYTES, Client, HELLO_BYTES, Identity, Purpose, Server, SessionKeys,
};
use towline_wire::card::{AgentCard, Endpoint, Fingerprint, RegionCard};
use towline_wire::control::{Body, decode, encode, v1};
use towline_wire::frame::{FrameKind, HEADER_BYTES, Header, Opener, Reply, Request, Sealer, Status};
use towline_wire::id::{BootEpoch, EngineId, RegionId};
use towline_wire::receipt::TransportKind;

use crate::support::{PATIENCE, key, name};

/// An authenticated session.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    sealer: Sealer,
    opener: Opener,
}

impl Raw {
    /// Connects as an agent that holds the cluster's key.
    pub(crate) fn dial(address: SocketAddr, purpose: Purpose) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (client, hello) = Client::start(key(), purpose, [3; 32]);
        stream.write_all(&hello).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        let identity = Identity { agent: name("raw-client"), boot_epoch: BootEpoch(1) };
        let (auth, keys) = client.handle_challenge(&challenge, &identity).unwrap();
        stream.write_all(&auth).unwrap();
        let SessionKeys { client, server } = keys;
        Self { stream, sealer: Sealer::new(client), opener: Opener::new(server) }
    }

    pub(crate) fn accept(mut stream: TcpStream) -> (Self, Purpose) {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).unwrap();
        let (server, challenge) = Server::handle_hello(key(), hello, [4; 32]).unwrap();
        let purpose = server.purpose();
        stream.write_all(&challenge).unwrap();
        let mut head = [0; AUTH_HEAD_BYTES];
        stream.read_exact(&mut head).unwrap();
        let mut name = vec![0; Server::auth_name_len(&head).unwrap()];
        stream.read_exact(&mut name).unwrap();
        let (_, SessionKeys { client, server }) = server.handle_auth(&head, &name).unwrap();
        (Self { stream, sealer: Sealer::new(server), opener: Opener::new(client) }, purpose)
    }

    pub(crate) fn seal(&mut self, kind: FrameKind, body: &[u8]) -> Vec<u8> {
        self.sealer.seal(kind, body).unwrap()
    }

    pub(crate) fn send(&mut self, kind: FrameKind, body: &[u8]) {
        let frame = self.seal(kind, body);
        self.stream.write_all(&frame).unwrap();
    }

    /// The next frame; `None` when the other side has closed.
    pub(crate) fn receive(&mut self) -> Option<(FrameKind, Vec<u8>)> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).ok()?;
        let header = Header::parse(&head).unwrap();
        let mut body = vec![0; header.len];
        self.stream.read_exact(&mut body).ok()?;
        self.opener.open(&header, &body).unwrap();
        Some((header.kind, body))
    }

    pub(crate) fn receive_request(&mut self) -> Request {
        let (_, body) = self.receive().expect("a request");
        Request::decode(&body).unwrap()
    }

    pub(crate) fn reply(&mut self, kind: FrameKind, call: u64, len: u64) {
        self.send(kind, &Reply { call, status: Status::Ok, len }.encode());
    }

    /// Asks and gives the status; of a read also the payload.
    pub(crate) fn ask(&mut self, kind: FrameKind, request: &Request, payload: &[u8]) -> (Status, Vec<u8>) {
        self.send(kind, &request.encode().unwrap());
        self.stream.write_all(payload).unwrap();
        let (_, body) = self.receive().expect("a reply");
        let reply = Reply::decode(&body).unwrap();
        assert_eq!(reply.call, request.call);
        let mut data = vec![0; if kind == FrameKind::Read { usize::try_from(reply.len).unwrap() } else { 0 }];
        self.stream.read_exact(&mut data).unwrap();
        (reply.status, data)
    }

    fn answer_card(&mut self, card: &AgentCard) -> bool {
        let Some((FrameKind::Control, body)) = self.receive() else { return false };
        if let Ok((call, Body::CardRequest(_))) = decode(&body) {
            self.send(FrameKind::Control, &encode(call, Body::Card(card.to_wire())));
        }
        true
    }
}

/// The region of a raw owner.
pub(crate) const REGION: RegionId = RegionId(1);

/// An owner whose data sessions the test holds.
pub(crate) struct RawOwner {
    pub(crate) address: SocketAddr,
    pub(crate) data: Receiver<Raw>,
    pub(crate) control: Receiver<TcpStream>,
}

/// Serves control sessions by itself and hands out data sessions, after they have had their card.
pub(crate) fn owner() -> RawOwner {
    owner_with_news(Vec::new(), card())
}

/// As [`owner`], and sends `news` unasked on each control session, after its card; who asks again there gets `later`.
pub(crate) fn owner_with_news(news: Vec<v1::Card>, later: AgentCard) -> RawOwner {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let ((data_to, data), (control_to, control)) = (channel(), channel());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut session, purpose) = Raw::accept(stream.unwrap());
            session.answer_card(&card());
            if purpose == Purpose::Data {
                let _ = data_to.send(session);
                continue;
            }
            let _ = control_to.send(session.stream.try_clone().unwrap());
            for card in &news {
                session.send(FrameKind::Control, &encode(0, Body::Card(card.clone())));
            }
            let later = later.clone();
            std::thread::spawn(move || while session.answer_card(&later) {});
        }
    });
    RawOwner { address, data, control }
}

/// What a raw owner offers.
pub(crate) fn card() -> AgentCard {
    AgentCard {
        agent: name("raw-owner"),
        engine: EngineId::from_bytes([2; 16]),
        boot_epoch: BootEpoch(77),
        endpoints: vec![Endpoint { transport: TransportKind::Tcp, address: vec![] }],
        regions: vec![RegionCard {
            id: REGION,
            len_bytes: 64 << 20,
            place: "host".into(),
            keys: vec![],
            peer_writable: true,
        }],
        fingerprint: Fingerprint::default(),
        fence_region: None,
        kv_region: None,
        revision: 1,
        place: String::new(),
    }
}

/// Encodes a control message that no session expects.
pub(crate) fn stray_answer() -> Vec<u8> {
    encode(99, Body::Done(v1::Done {}))
}
