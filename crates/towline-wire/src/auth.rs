//! Proof that both ends hold the cluster's key, and the keys of one session.
//!
//! Two agents share a 32-byte cluster key. The handshake has three messages of fixed form; a side that does not hold
//! the key learns nothing from it, and neither side reveals its name before the other has proved itself:
//!
//! ```text
//! client                                            server
//!   Hello      magic version purpose nonce_c   ->
//!              <-  Challenge   nonce_s  mac("server", hello, nonce_s)
//!   Auth       mac("client", hello, nonce_s, identity)  identity   ->
//! ```
//!
//! Both then derive one key for each direction; every frame that follows is sealed with it (`frame.rs`). This
//! authenticates; it does not encrypt: on a network that others can read, tickets and control messages are visible.
//! MACs and derivation are BLAKE3's keyed and derive-key modes (BLAKE3 paper, sections 2.2 and 2.3).

use std::fmt;

use thiserror::Error;

use crate::id::{AgentName, BootEpoch};

/// Version of handshake and frames. Peers of another version are refused by name, not guessed at.
pub const PROTOCOL_VERSION: u16 = 1;
/// Bytes of a [`Hello`](Client::start).
pub const HELLO_BYTES: usize = 40;
/// Bytes of a challenge.
pub const CHALLENGE_BYTES: usize = 64;
/// Bytes of an Auth message before the name: MAC, boot epoch, name length.
pub const AUTH_HEAD_BYTES: usize = 32 + 8 + 2;

const MAGIC: [u8; 4] = *b"TWLN";

/// The secret that all agents of a deployment share. Never printed.
#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// From 32 random bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads 64 hexadecimal digits, as they stand in a key file; white space around them is ignored.
    ///
    /// # Errors
    /// [`AuthError::KeyText`] for anything else. The text is not repeated in the error.
    pub fn from_hex(text: &str) -> Result<Self, AuthError> {
        blake3::Hash::from_hex(text.trim()).map(|hash| Self(*hash.as_bytes())).map_err(|_| AuthError::KeyText)
    }

    /// As 64 hexadecimal digits, to hand to a child process or write to a key file.
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// A MAC over `parts`, each prefixed by its length, for one purpose. Different purposes never collide.
    pub fn mac(&self, purpose: &str, parts: &[&[u8]]) -> Mac {
        let key = blake3::derive_key(purpose, &self.0);
        let mut hasher = blake3::Hasher::new_keyed(&key);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Mac(hasher.finalize())
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(…)")
    }
}

/// A 32-byte message authentication code. Comparison takes constant time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(blake3::Hash);

impl Mac {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }

    /// From bytes that a peer sent.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(blake3::Hash::from_bytes(bytes))
    }

    /// As hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.0.to_hex().to_string()
    }

    /// From 64 hexadecimal digits; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(Self)
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Purpose {
    /// Cards, leases, notifications.
    Control = 1,
    /// Reads and writes of regions.
    Data = 2,
}

/// Who is at the other end, proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its agent's name.
    pub agent: AgentName,
    /// Its incarnation.
    pub boot_epoch: BootEpoch,
}

/// The keys of one session: one for each direction.
#[derive(Clone)]
pub struct SessionKeys {
    /// Seals what the client sends.
    pub client: [u8; 32],
    /// Seals what the server sends.
    pub server: [u8; 32],
}

impl fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKeys(…)")
    }
}

fn session_keys(key: &ClusterKey, hello: &[u8], nonce: &[u8]) -> SessionKeys {
    let derive = |purpose| *key.mac(purpose, &[hello, nonce]).as_bytes();
    SessionKeys {
        client: derive("towline 2026 session client"),
        server: derive("towline 2026 session server"),
    }
}

fn server_proof(key: &ClusterKey, hello: &[u8], nonce: &[u8]) -> Mac {
    key.mac("towline 2026 handshake server", &[hello, nonce])
}

fn client_proof(key: &ClusterKey, hello: &[u8], nonce: &[u8], identity: &Identity) -> Mac {
    let epoch = identity.boot_epoch.0.to_le_bytes();
    key.mac("towline 2026 handshake client", &[hello, nonce, identity.agent.as_str().as_bytes(), &epoch])
}

/// The connecting side, after its Hello.
#[derive(Debug)]
pub struct Client {
    key: ClusterKey,
    hello: [u8; HELLO_BYTES],
}

impl Client {
    /// Opens a handshake with a fresh random `nonce`; send the returned bytes.
    pub fn start(key: ClusterKey, purpose: Purpose, nonce: [u8; 32]) -> (Self, [u8; HELLO_BYTES]) {
        let mut hello = [0; HELLO_BYTES];
        hello[..4].copy_from_slice(&MAGIC);
        hello[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        hello[6..8].copy_from_slice(&(purpose as u16).to_le_bytes());
        hello[8..].copy_from_slice(&nonce);
        (Self { key, hello }, hello)
    }

    /// Checks the server's proof; answers with the Auth message to send and the session's keys.
    ///
    /// # Errors
    /// [`AuthError::Proof`] when the server does not hold the key.
    pub fn handle_challenge(
        self,
        challenge: &[u8; CHALLENGE_BYTES],
        identity: &Identity,
    ) -> Result<(Vec<u8>, SessionKeys), AuthError> {
        let (nonce, proof) = split_challenge(challenge);
        if server_proof(&self.key, &self.hello, &nonce) != proof {
            return Err(AuthError::Proof);
        }
        let name = identity.agent.as_str().as_bytes();
        let mut auth = Vec::with_capacity(AUTH_HEAD_BYTES + name.len());
        auth.extend_from_slice(client_proof(&self.key, &self.hello, &nonce, identity).as_bytes());
        auth.extend_from_slice(&identity.boot_epoch.0.to_le_bytes());
        let len = u16::try_from(name.len()).map_err(|_| AuthError::Malformed)?;
        auth.extend_from_slice(&len.to_le_bytes());
        auth.extend_from_slice(name);
        Ok((auth, session_keys(&self.key, &self.hello, &nonce)))
    }
}

/// The accepting side, after a Hello.
#[derive(Debug)]
pub struct Server {
    key: ClusterKey,
    hello: [u8; HELLO_BYTES],
    nonce: [u8; 32],
    purpose: Purpose,
}

impl Server {
    /// Checks a Hello; answers with the challenge to send, made of a fresh random `nonce`.
    ///
    /// # Errors
    /// [`AuthError::NotTowline`] or [`AuthError::Version`]: close the connection.
    pub fn handle_hello(
        key: ClusterKey,
        hello: [u8; HELLO_BYTES],
        nonce: [u8; 32],
    ) -> Result<(Self, [u8; CHALLENGE_BYTES]), AuthError> {
        if hello[..4] != MAGIC {
            return Err(AuthError::NotTowline);
        }
        let found = u16::from_le_bytes([hello[4], hello[5]]);
        if found != PROTOCOL_VERSION {
            return Err(AuthError::Version { found });
        }
        let purpose = match u16::from_le_bytes([hello[6], hello[7]]) {
            1 => Purpose::Control,
            2 => Purpose::Data,
            _ => return Err(AuthError::Malformed),
        };
        let mut challenge = [0; CHALLENGE_BYTES];
        challenge[..32].copy_from_slice(&nonce);
        challenge[32..].copy_from_slice(server_proof(&key, &hello, &nonce).as_bytes());
        Ok((Self { key, hello, nonce, purpose }, challenge))
    }

    /// What the client connects for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Bytes of the name that follows an Auth message's fixed head.
    ///
    /// # Errors
    /// [`AuthError::Malformed`] when it is longer than a name can be.
    pub fn auth_name_len(head: &[u8; AUTH_HEAD_BYTES]) -> Result<usize, AuthError> {
        let len = usize::from(u16::from_le_bytes([head[40], head[41]]));
        if len <= AgentName::LEN_MAX { Ok(len) } else { Err(AuthError::Malformed) }
    }

    /// Checks the client's proof over the identity it claims.
    ///
    /// # Errors
    /// [`AuthError::Proof`] when the client does not hold the key; [`AuthError::Malformed`] for a bad name.
    pub fn handle_auth(
        self,
        head: &[u8; AUTH_HEAD_BYTES],
        name: &[u8],
    ) -> Result<(Identity, SessionKeys), AuthError> {
        let name = std::str::from_utf8(name).map_err(|_| AuthError::Malformed)?;
        let agent = AgentName::new(name).map_err(|_| AuthError::Malformed)?;
        let (mut proof, mut epoch) = ([0; 32], [0; 8]);
        proof.copy_from_slice(&head[..32]);
        epoch.copy_from_slice(&head[32..40]);
        let identity = Identity { agent, boot_epoch: BootEpoch(u64::from_le_bytes(epoch)) };
        if client_proof(&self.key, &self.hello, &self.nonce, &identity) != Mac::from_bytes(proof) {
            return Err(AuthError::Proof);
        }
        Ok((identity, session_keys(&self.key, &self.hello, &self.nonce)))
    }
}

fn split_challenge(challenge: &[u8; CHALLENGE_BYTES]) -> ([u8; 32], Mac) {
    let (mut nonce, mut proof) = ([0; 32], [0; 32]);
    nonce.copy_from_slice(&challenge[..32]);
    proof.copy_from_slice(&challenge[32..]);
    (nonce, Mac::from_bytes(proof))
}

/// Why a handshake ended.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AuthError {
    /// Something else speaks on this port.
    #[error("the peer does not speak Towline's protocol")]
    NotTowline,
    /// Run the same release on both sides.
    #[error("the peer speaks protocol version {found}, this build speaks {PROTOCOL_VERSION}")]
    Version {
        /// The peer's version.
        found: u16,
    },
    /// Give both sides the same cluster key.
    #[error("the peer does not hold this cluster's key")]
    Proof,
    /// The peer is broken or hostile.
    #[error("the peer's handshake message is malformed")]
    Malformed,
    /// Write the key as 64 hexadecimal digits.
    #[error("a cluster key is 64 hexadecimal digits")]
    KeyText,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity { agent: AgentName::new("decode-0").unwrap(), boot_epoch: BootEpoch(42) }
    }

    fn handshake(
        client_key: [u8; 32],
        server_key: [u8; 32],
    ) -> Result<(Identity, SessionKeys, SessionKeys), AuthError> {
        let (client, hello) = Client::start(ClusterKey::from_bytes(client_key), Purpose::Data, [1; 32]);
        let (server, challenge) = Server::handle_hello(ClusterKey::from_bytes(server_key), hello, [2; 32])?;
        assert_eq!(server.purpose(), Purpose::Data);
        let (auth, client_keys) = client.handle_challenge(&challenge, &identity())?;
        let (head, name) = auth.split_first_chunk::<AUTH_HEAD_BYTES>().unwrap();
        assert_eq!(Server::auth_name_len(head)?, name.len());
        let (peer, server_keys) = server.handle_auth(head, name)?;
        Ok((peer, client_keys, server_keys))
    }

    #[test]
    fn equal_keys_agree_on_identity_and_session() {
        let (peer, client, server) = handshake([9; 32], [9; 32]).unwrap();
        assert_eq!(peer, identity());
        assert_eq!((client.client, client.server), (server.client, server.server));
        assert_ne!(client.client, client.server);
    }

    #[test]
    fn a_server_without_the_key_is_refused_before_the_client_names_itself() {
        assert_eq!(handshake([9; 32], [8; 32]).unwrap_err(), AuthError::Proof);
    }

    #[test]
    fn a_client_without_the_key_is_refused() {
        let right = ClusterKey::from_bytes([9; 32]);
        let (_, hello) = Client::start(ClusterKey::from_bytes([8; 32]), Purpose::Control, [1; 32]);
        let (server, _) = Server::handle_hello(right, hello, [2; 32]).unwrap();
        let mut head = [0; AUTH_HEAD_BYTES];
        head[40] = 1;
        assert_eq!(server.handle_auth(&head, b"x").unwrap_err(), AuthError::Proof);
    }

    #[test]
    fn strangers_and_other_versions_are_told_apart() {
        let (_, mut hello) = Client::start(ClusterKey::from_bytes([9; 32]), Purpose::Control, [1; 32]);
        hello[4] = 77;
        let answer =
            |hello| Server::handle_hello(ClusterKey::from_bytes([9; 32]), hello, [2; 32]).map(|_| ());
        assert_eq!(answer(hello), Err(AuthError::Version { found: 77 }));
        hello[0] = b'G';
        assert_eq!(answer(hello), Err(AuthError::NotTowline));
    }

    #[test]
    fn a_key_round_trips_as_hex_and_is_never_printed() {
        let key = ClusterKey::from_bytes([0xab; 32]);
        assert_eq!(ClusterKey::from_hex(&format!(" {}\n", key.to_hex())).unwrap().to_hex(), key.to_hex());
        assert_eq!(ClusterKey::from_hex("abc").unwrap_err(), AuthError::KeyText);
        assert!(!format!("{key:?}").contains("ab"));
    }
}
