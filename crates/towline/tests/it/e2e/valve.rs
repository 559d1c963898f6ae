//! A proxy in front of a prefill worker's agent that can stop the KV half-way.
//!
//! Control connections pass. A data connection passes its handshake and the first bytes of the answer, then nothing
//! more comes back, while both sides stay connected: what a stalled network looks like. Which is which stands in the
//! Hello (docs/wire.md, section 2).

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::process::PATIENCE;

const HELLO_BYTES: usize = 40;
const DATA: u8 = 2;

/// Passes everything of a control connection, and of a data connection what `data_bytes` allows.
pub(super) struct Valve {
    /// What the prefill worker must advertise.
    pub(super) address: SocketAddr,
    /// Where the prefill worker must listen.
    pub(super) upstream: SocketAddr,
    held: Receiver<()>,
}

impl Valve {
    /// `data_bytes` of each data connection come back before it is held.
    pub(super) fn open(data_bytes: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // Free a moment ago, and taken by the worker in a moment: on an address of our own, because others take ports of
        // the usual one all the time.
        let upstream = TcpListener::bind((own_loopback(), 0)).unwrap().local_addr().unwrap();
        let (holds, held) = channel();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let holds = holds.clone();
                std::thread::spawn(move || pass(client, upstream, data_bytes, &holds));
            }
        });
        Self { address, upstream, held }
    }

    /// Waits until a data connection is held half-way.
    pub(super) fn holds(&self) {
        self.held.recv_timeout(PATIENCE).expect("no KV ever came through");
    }
}

/// A loopback address that no other test process uses.
fn own_loopback() -> Ipv4Addr {
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 77, high, low.max(1))
}

/// Errors end the connection, as they would end a real one.
fn pass(client: TcpStream, upstream: SocketAddr, data_bytes: usize, holds: &Sender<()>) {
    let Ok(server) = TcpStream::connect(upstream) else { return };
    let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let mut hello = [0; HELLO_BYTES];
    if from_client.read_exact(&mut hello).is_err() || to_server.write_all(&hello).is_err() {
        return;
    }
    let is_data = hello[6] == DATA;
    std::thread::spawn(move || {
        _ = std::io::copy(&mut from_client, &mut to_server);
        _ = to_server.shutdown(Shutdown::Both);
    });
    let (mut from_server, mut to_client) = (server, client);
    if is_data {
        _ = std::io::copy(&mut (&mut from_server).take(data_bytes as u64), &mut to_client);
        _ = holds.send(());
        // Read on without passing on, so that the end of either side is still noticed.
        _ = std::io::copy(&mut from_server, &mut std::io::sink());
    } else {
        _ = std::io::copy(&mut from_server, &mut to_client);
    }
    _ = to_client.shutdown(Shutdown::Both);
}
