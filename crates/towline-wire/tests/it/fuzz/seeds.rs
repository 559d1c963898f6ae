//! Valid encodings of everything that crosses a process boundary: where mutations start from.

use prost::Message;
use towline_wire::auth::{CHALLENGE_BYTES, Client, Identity, Purpose, Server};
use towline_wire::blocks::Extent;
use towline_wire::card::{AgentCard, Endpoint, Fingerprint, RegionCard};
use towline_wire::carried_card::CarriedCard;
use towline_wire::control::{self, Body, v1};
use towline_wire::digest::{DigestMode, Digests};
use towline_wire::engine_card::{EngineCard, RankAgent};
use towline_wire::fence::Fence;
use towline_wire::frame::{FrameKind, Reply, Request, Sealer, Status};
use towline_wire::id::{AgentName, BootEpoch, EngineId, Generation, LeaseId, RegionId};
use towline_wire::kv_params::{PrefillParams, RemoteKv, TransferMode};
use towline_wire::layout::{Arrangement, Gqa, Group, GroupKind, HeadOrder, KvLayout, Part, Split};
use towline_wire::parts::Parts;
use towline_wire::receipt::TransportKind;
use towline_wire::reshard::Array;
use towline_wire::shard::Sharding;
use towline_wire::ticket::{BlockTable, GroupBlocks, RankTicket, SealedTicket, TICKET_SCHEMA, Ticket};

use super::harness::{SERVER_NONCE, key};

type Seeds = Vec<Vec<u8>>;

fn engine() -> EngineId {
    EngineId::from_bytes([3; 16])
}

fn name(text: &str) -> AgentName {
    AgentName::new(text).unwrap()
}

fn gqa() -> KvLayout {
    KvLayout::gqa(Gqa { layers: 4, kv_heads: 4, head_dim: 8, element_bytes: 2, block_tokens: 16 })
}

fn card(agent: &str) -> AgentCard {
    let region = |id, place: &str| RegionCard {
        id: RegionId(id),
        len_bytes: 4096,
        place: place.into(),
        keys: vec![(TransportKind::Shm, vec![1, 2]), (TransportKind::Ucx, vec![9; 40])],
        peer_writable: id == 2,
    };
    AgentCard {
        agent: name(agent),
        engine: engine(),
        boot_epoch: BootEpoch(u64::MAX),
        endpoints: vec![Endpoint { transport: TransportKind::Tcp, address: b"127.0.0.1:1".to_vec() }],
        regions: vec![region(1, "host"), region(2, "cuda:0")],
        fingerprint: Fingerprint {
            rope: "base=100000".into(),
            layout: gqa().describe(),
            ..Fingerprint::default()
        },
        fence_region: Some(RegionId(2)),
        kv_region: Some(RegionId(1)),
        revision: 1 << 40,
        place: r#"{"host_name":"node-7","cpus":"0-3"}"#.into(),
    }
}

pub(super) fn agent_cards() -> Seeds {
    let bare =
        AgentCard { endpoints: vec![], regions: vec![], fence_region: None, kv_region: None, ..card("a") };
    vec![card("prefill-0").to_wire().encode_to_vec(), bare.to_wire().encode_to_vec()]
}

pub(super) fn carried_cards() -> Seeds {
    let of = |card| CarriedCard { card, address: "10.0.0.4:7000".into(), expires_unix_s: u64::MAX };
    let part = card("prefill-0").with_regions(&[RegionId(2)]).unwrap();
    [of(card("prefill-0")), of(part)].map(|carried| carried.seal(&key()).unwrap()).to_vec()
}

fn engines() -> Vec<EngineCard> {
    let address = RankAgent::Address { agent: name("p/1"), address: "10.0.0.4:7000".into() };
    let of = |tp_size, ranks| EngineCard {
        engine: engine(),
        sharding: Sharding { tp_size, stage_layers: vec![4] },
        layout: gqa(),
        fingerprint: card("a").fingerprint,
        ranks,
    };
    let known = || RankAgent::Card(Box::new(card("p/0")));
    vec![of(2, vec![known(), address]), of(1, vec![known()])]
}

pub(super) fn engine_cards() -> Seeds {
    engines().iter().map(EngineCard::encode).collect()
}

pub(super) fn controls() -> Seeds {
    let bodies = [
        Body::CardRequest(v1::CardRequest {}),
        Body::Card(card("prefill-0").to_wire()),
        Body::Release(v1::Release { lease: 7, generation: u64::MAX }),
        Body::Heartbeat(v1::Heartbeat { leases: vec![1, 2, 1 << 40] }),
        Body::Notify(v1::Notify { payload: b"done".to_vec() }),
        Body::Refused(v1::Refused { code: "lease-over".into(), message: "it is over".into() }),
        Body::Done(v1::Done {}),
        Body::EngineCardRequest(v1::EngineCardRequest {}),
        Body::EngineCard(engines()[0].to_wire()),
        Body::ForeignRegion(v1::ForeignRegion { base: 1 << 46, nonce_at: u64::MAX }),
    ];
    assert!(bodies.iter().all(is_seeded), "each kind of message has a seed");
    (0..).zip(bodies).map(|(call, body)| control::encode(call, body)).collect()
}

/// Written without a wildcard, so that a new message does not compile until it is listed here; then seed it above.
fn is_seeded(body: &Body) -> bool {
    match body {
        Body::CardRequest(_) | Body::Card(_) | Body::Release(_) | Body::Heartbeat(_) => true,
        Body::Notify(_) | Body::Refused(_) | Body::Done(_) => true,
        Body::EngineCardRequest(_) | Body::EngineCard(_) | Body::ForeignRegion(_) => true,
    }
}

pub(super) fn frames() -> Seeds {
    let seal = |kind, body: &[u8]| Sealer::new([7; 32]).seal(kind, body).unwrap();
    vec![
        seal(FrameKind::Control, &controls()[2]),
        seal(FrameKind::Read, &requests()[0]),
        seal(FrameKind::ReadReply, &replies()[0]),
        seal(FrameKind::Write, b""),
        seal(FrameKind::WriteReply, &replies()[1]),
    ]
}

pub(super) fn requests() -> Seeds {
    let request = |lease, extents| Request { call: 1 << 40, region: RegionId(3), lease, extents };
    let extents = |count: u64| (0..count).map(|at| Extent { offset: at * 64, len: 64 }).collect();
    let lease = Some((LeaseId(5), Generation(6)));
    vec![request(lease, extents(9)).encode().unwrap(), request(None, extents(1)).encode().unwrap()]
}

pub(super) fn replies() -> Seeds {
    let reply = |status, len| Reply { call: 4, status, len }.encode().to_vec();
    vec![reply(Status::Ok, 1 << 20), reply(Status::LeaseExpired, 0)]
}

pub(super) fn fence_slots() -> Seeds {
    vec![Fence { generation: Generation(77), parts_ready: 1 }.encode().to_vec()]
}

pub(super) fn handshakes() -> Seeds {
    let made = |purpose, agent: &str| {
        let (client, hello) = Client::start(key(), purpose, [1; 32]);
        let (_, challenge) = Server::handle_hello(key(), hello, SERVER_NONCE).unwrap();
        let identity = Identity { agent: name(agent), boot_epoch: BootEpoch(42) };
        let (auth, _) = client.handle_challenge(&challenge, &identity).unwrap();
        [hello.as_slice(), &auth].concat()
    };
    vec![made(Purpose::Control, "decode-0"), made(Purpose::Data, &"x".repeat(AgentName::LEN_MAX))]
}

pub(super) fn challenges() -> Seeds {
    let (_, hello) = Client::start(key(), Purpose::Control, [1; 32]);
    let (_, challenge): (_, [u8; CHALLENGE_BYTES]) = Server::handle_hello(key(), hello, [9; 32]).unwrap();
    vec![challenge.to_vec()]
}

fn rank(agent: &str, count: usize) -> RankTicket {
    RankTicket {
        agent: name(agent),
        boot_epoch: BootEpoch(u64::MAX),
        address: "127.0.0.1:7000".into(),
        lease: LeaseId(4),
        generation: Generation(9),
        slot: 1,
        region: RegionId(1),
        fence_region: RegionId(2),
        parts_ready: 1,
        groups: vec![GroupBlocks { arrays: vec![Array { base: 64, stride: 4096 }], table: 0 }],
        digests: Digests::of(DigestMode::Full, count, |position| position as u64 * 0x0123_4567_89ab),
    }
}

fn ticket(blocks: Vec<u32>) -> Ticket {
    Ticket {
        schema: TICKET_SCHEMA,
        engine: engine(),
        layout: None,
        tp_size: 1,
        stage_layers: vec![4],
        ranks: vec![rank("prefill-0", blocks.len())],
        tokens: u32::try_from(blocks.len()).unwrap() * 16,
        tables: vec![BlockTable { first_block: 0, blocks }],
        part_layers: Parts::whole(4),
        prompt_hash: "00ff".into(),
        audience: "default".into(),
        expires_unix_s: 1_900_000_000,
    }
}

/// Two ranks, one table, lent layer by layer.
fn sharded() -> Ticket {
    let ranks = ["p/0", "p/1"].map(|agent| rank(agent, 2)).to_vec();
    Ticket { layout: Some(gqa()), tp_size: 2, ranks, part_layers: Parts::by_layer(4), ..ticket(vec![5, 2]) }
}

fn seal(ticket: Ticket) -> SealedTicket {
    ticket.seal(&key())
}

pub(super) fn tickets() -> Seeds {
    [ticket(vec![5, 2]), ticket(vec![]), sharded()]
        .map(|ticket| serde_json::to_vec(&seal(ticket)).unwrap())
        .to_vec()
}

/// Tickets that a holder of the key could seal and nobody can serve: they must be refused, not computed with.
pub(super) fn impossible_tickets() -> Seeds {
    let array = |base, stride| {
        let mut ticket = ticket(vec![0, 3]);
        ticket.ranks[0].groups[0].arrays[0] = Array { base, stride };
        ticket
    };
    let mut deep = ticket(vec![1]);
    deep.stage_layers = vec![u32::MAX, u32::MAX];
    [array(0, u64::MAX / 2), array(u64::MAX, 1), deep]
        .map(|ticket| serde_json::to_vec(&seal(ticket)).unwrap())
        .to_vec()
}

pub(super) fn remote_kvs() -> Seeds {
    let of = |towline| RemoteKv {
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_block_ids: vec![vec![5, 2], vec![]],
        remote_engine_id: engine(),
        remote_request_id: "cmpl-1".into(),
        remote_host: "127.0.0.1".into(),
        remote_port: 7000,
        tp_size: 1,
        remote_num_tokens: 32,
        transfer_mode: TransferMode::Pull,
        remote_prefill_cached_tokens: 0,
        towline,
    };
    [of(Some(seal(ticket(vec![5, 2])))), of(None)].map(|params| serde_json::to_vec(&params).unwrap()).to_vec()
}

pub(super) fn prefill_params() -> Seeds {
    vec![serde_json::to_vec(&PrefillParams::ASK).unwrap()]
}

pub(super) fn digests() -> Seeds {
    let of =
        |mode| serde_json::to_vec(&Digests::of(mode, 20, |position| u64::MAX - position as u64)).unwrap();
    vec![of(DigestMode::Full), of(DigestMode::Sampled), of(DigestMode::Off)]
}

pub(super) fn layouts() -> Seeds {
    let part = |name: &str, bytes, split| Part {
        name: name.into(),
        bytes,
        align: 64,
        split,
        element_bytes: 1,
        dtype: Some("u8".into()),
    };
    let group = |kind, layers, parts| Group {
        kind,
        layers,
        block_tokens: 16,
        parts,
        heads: HeadOrder::Nhd,
        arrangement: Arrangement::LayerMajor,
    };
    let window = GroupKind::SlidingWindow { window_tokens: 128 };
    let hybrid = KvLayout {
        groups: vec![
            group(
                window,
                vec![0, 2],
                vec![part("k", 8192, Split::Heads(8)), part("v", 8192, Split::Heads(8))],
            ),
            group(GroupKind::Mla, vec![1], vec![part("latent", 9216, Split::Replicated)]),
            group(GroupKind::State, vec![3], vec![part("state", 4096, Split::Heads(4))]),
        ],
    };
    [gqa(), hybrid].map(|layout| layout.describe().into_bytes()).to_vec()
}
