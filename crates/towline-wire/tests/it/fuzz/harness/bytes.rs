//! Decoders of fixed binary forms: frames, requests, replies, fence slots, the handshake.

use towline_wire::auth::{AUTH_HEAD_BYTES, CHALLENGE_BYTES, Client, HELLO_BYTES, Identity, Purpose, Server};
use towline_wire::fence::Fence;
use towline_wire::frame::{
    BODY_BYTES_MAX, EXTENTS_MAX, HEADER_BYTES, Header, Opener, PAYLOAD_BYTES_MAX, Reply, Request, Sealer,
};
use towline_wire::id::{AgentName, BootEpoch};

use super::{SERVER_NONCE, key};

/// A header and a body, as the first frame of a session: it opens exactly when it is, byte for byte, what the key's
/// holder would have sent.
pub(crate) fn frame(bytes: &[u8]) -> bool {
    let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return false };
    let Ok(header) = Header::parse(head) else { return false };
    assert!(header.len <= BODY_BYTES_MAX);
    let Some(body) = body.get(..header.len) else { return false };
    let opened = Opener::new([7; 32]).open(&header, body).is_ok();
    let sealed = Sealer::new([7; 32]).seal(header.kind, body).expect("the header's length is in bounds");
    assert_eq!(opened, sealed == bytes[..HEADER_BYTES + header.len], "a frame of many forms, or of none");
    opened
}

pub(crate) fn request(bytes: &[u8]) -> bool {
    let Ok(request) = Request::decode(bytes) else { return false };
    assert!((1..=EXTENTS_MAX).contains(&request.extents.len()));
    assert!((1..=PAYLOAD_BYTES_MAX).contains(&request.payload_bytes()));
    assert!(request.extents.iter().all(|extent| extent.offset.checked_add(extent.len).is_some()));
    let again = request.encode().expect("what decodes is in bounds");
    assert_eq!(again.len(), bytes.len());
    assert_eq!(Request::decode(&again), Ok(request));
    true
}

pub(crate) fn reply(bytes: &[u8]) -> bool {
    let Ok(reply) = Reply::decode(bytes) else { return false };
    assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    assert_eq!(bytes[..16], reply.encode()[..16]);
    true
}

pub(crate) fn fence_slot(bytes: &[u8]) -> bool {
    let Some(slot) = bytes.first_chunk::<24>() else { return false };
    let Ok(fence) = Fence::decode(slot) else { return false };
    assert_eq!(fence.encode(), *slot);
    assert!(fence.check(fence.generation, fence.parts_ready).is_ok());
    true
}

/// A Hello and an Auth message, one after the other, as a server meets them.
pub(crate) fn handshake(bytes: &[u8]) -> bool {
    let Some((hello, auth)) = bytes.split_first_chunk::<HELLO_BYTES>() else { return false };
    let Ok((server, challenge)) = Server::handle_hello(key(), *hello, SERVER_NONCE) else { return false };
    let nonce = *hello.last_chunk::<32>().expect("a hello is longer");
    let (client, canonical) = Client::start(key(), server.purpose(), nonce);
    assert_eq!(canonical, *hello, "one purpose and nonce, one hello");
    let Some((head, name)) = auth.split_first_chunk::<AUTH_HEAD_BYTES>() else { return false };
    let Ok(length) = Server::auth_name_len(head) else { return false };
    assert!(length <= AgentName::LEN_MAX);
    let Some(name) = name.get(..length) else { return false };
    let Ok((identity, keys)) = server.handle_auth(head, name) else { return false };
    let (made, ours) = client.handle_challenge(&challenge, &identity).expect("the server holds the key");
    assert_eq!(made, auth[..AUTH_HEAD_BYTES + length], "only a holder of the key makes it");
    assert_eq!((keys.client, keys.server), (ours.client, ours.server));
    true
}

/// A challenge as a client meets it: taken exactly when a holder of the key made it for this hello.
pub(crate) fn challenge(bytes: &[u8]) -> bool {
    let Some(challenge) = bytes.first_chunk::<CHALLENGE_BYTES>() else { return false };
    let (client, hello) = Client::start(key(), Purpose::Control, [1; 32]);
    let nonce = *challenge.first_chunk::<32>().expect("a challenge is longer");
    let (_, made) = Server::handle_hello(key(), hello, nonce).expect("the hello is well-formed");
    let agent = AgentName::new("d").expect("a name");
    let taken = client.handle_challenge(challenge, &Identity { agent, boot_epoch: BootEpoch(1) }).is_ok();
    assert_eq!(taken, made == *challenge);
    taken
}
