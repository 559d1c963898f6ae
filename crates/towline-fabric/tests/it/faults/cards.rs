//! Owners that hold the cluster's key and send a card that is wrong.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};

use towline_wire::auth::Purpose;
use towline_wire::control::{Body, decode, encode, v1};
use towline_wire::frame::{BODY_BYTES_MAX, FrameKind, HEADER_BYTES};
use towline_wire::receipt::TransportKind;

use super::ends;
use super::fault::CardFlaw;
use super::scene::Other;
use crate::raw::{self, Raw};
use crate::support::*;

/// Serves every session one card.
fn owner(flaw: CardFlaw) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let (mut session, purpose) = Raw::accept(stream);
                let Some((FrameKind::Control, question)) = session.receive() else { return };
                let (call, _) = decode(&question).unwrap();
                answer(&mut session, call, (flaw, purpose));
                while session.receive().is_some() {}
            });
        }
    });
    address
}

fn answer(session: &mut Raw, call: u64, (flaw, purpose): (CardFlaw, Purpose)) {
    let mut card = raw::card().to_wire();
    let body = |card: v1::Card| encode(call, Body::Card(card));
    let sent = match flaw {
        CardFlaw::Version => {
            card.version += 1;
            session.seal(FrameKind::Control, &body(card))
        }
        CardFlaw::Truncated => {
            let whole = body(card);
            session.seal(FrameKind::Control, &whole[..whole.len() / 2])
        }
        CardFlaw::TooLong => {
            card.fingerprint.get_or_insert_default().rope = "x".repeat(70 << 10);
            session.seal(FrameKind::Control, &body(card))
        }
        CardFlaw::LongerThanAFrame => {
            let len = u32::try_from(BODY_BYTES_MAX + 1024).unwrap();
            let mut frame = vec![0; HEADER_BYTES + BODY_BYTES_MAX + 1024];
            frame[..4].copy_from_slice(&len.to_le_bytes());
            frame[4] = FrameKind::Control as u8;
            frame
        }
        CardFlaw::Tampered => {
            let mut frame = session.seal(FrameKind::Control, &body(card));
            *frame.last_mut().unwrap() ^= 1;
            frame
        }
        CardFlaw::OfAnother => {
            card.boot_epoch += u64::from(purpose == Purpose::Data);
            session.seal(FrameKind::Control, &body(card))
        }
    };
    // The reader may have hung up before the end of it.
    let _ = session.stream.write_all(&sent);
}

/// Connects to an owner with that card.
pub(super) fn play(flaw: CardFlaw, kind: TransportKind) -> &'static str {
    let (reader, _) = start(config("reader"));
    let error = wait(reader.connect(&owner(flaw).to_string(), only(kind))).unwrap_err();
    if flaw == CardFlaw::Version {
        assert!(error.to_string().contains("version 2, this build reads 1"), "{error}");
    }
    eventually("no place is lost", || reader.stats().peers == 0);
    Other::new().serves(&reader, kind);
    ends::of_connect(&error)
}
