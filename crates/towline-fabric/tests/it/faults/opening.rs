//! What a caller is told when something goes wrong while the path opens and several notice: the transports that are tried,
//! the control session, the deadline. The transports here are doors that the test opens or shuts when it likes, so that
//! who notices first is not left to chance.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use towline_fabric::transport::{Capabilities, Opened, Path, PathError, PeerAddress, Slice, Transport};
use towline_fabric::{
    Access, Agent, ConnectError, ConnectOptions, Memory, Peer, Pending, RegisterError, ShmConfig,
};
use towline_wire::frame::Status;
use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass, TransportKind};

use crate::raw::{self, RawOwner};
use crate::support::*;

/// In the order in which they are tried.
const DOORS: [TransportKind; 2] = [TransportKind::Ucx, TransportKind::Libfabric];

/// What a door does when somebody knocks.
type Knock = dyn Fn(&PeerAddress, Opened) + Send + Sync;

struct Door(TransportKind, Arc<Knock>);

impl Transport for Door {
    fn kind(&self) -> TransportKind {
        self.0
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: true,
            device_memory: false,
            checked_by_owner: true,
            ordered: true,
            extents_max: 1,
        }
    }

    fn endpoint(&self) -> Option<Vec<u8>> {
        Some(Vec::new())
    }

    fn register(&self, _: RegionId, _: &Arc<Memory>, _: Access) -> Result<Option<Vec<u8>>, RegisterError> {
        Ok(Some(Vec::new()))
    }

    fn deregister(&self, _: RegionId) {}

    fn connect(&self, peer: &PeerAddress, opened: Opened) {
        (self.1)(peer, opened);
    }
}

/// A path that leads nowhere, and counts how often it is closed.
#[derive(Default)]
struct Dead(AtomicUsize);

impl Path for Dead {
    fn evidence(&self) -> Evidence {
        Evidence { class: EvidenceClass::None, source: "a test".into() }
    }

    fn rails(&self) -> Vec<String> {
        Vec::new()
    }

    fn post(&self, slice: Slice) {
        slice.complete(Err(PathError::Refused(Status::UnknownRegion)));
    }

    fn close(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A reader with both doors, and nothing else that `TransportChoice::Auto` would try.
fn reader(knock: impl Fn(usize, &PeerAddress, Opened) + Send + Sync + 'static) -> Agent {
    let mut config = config("reader");
    (config.shm, config.tcp) = (ShmConfig::Off, false);
    let knock = Arc::new(knock);
    let doors = (0..DOORS.len()).map(|index| -> Arc<dyn Transport> {
        let knock = Arc::clone(&knock);
        Arc::new(Door(DOORS[index], Arc::new(move |peer: &PeerAddress, opened| knock(index, peer, opened))))
    });
    Agent::start_with(config, Arc::new(Book::default()), doors.collect()).unwrap()
}

fn connect(reader: &Agent, address: &str, deadline: Duration) -> Pending<Result<Peer, ConnectError>> {
    reader.connect(address, ConnectOptions { deadline, ..ConnectOptions::default() })
}

/// The doors say these, one after the other, to a peer that is there.
fn told(says: [PathError; 2]) -> ConnectError {
    let reader = reader(move |index, _, opened| opened(Err(says[index].clone())));
    let error = wait(connect(&reader, &raw::owner().address.to_string(), PATIENCE)).unwrap_err();
    eventually("no place is lost", || reader.stats().peers == 0);
    error
}

fn down() -> PathError {
    PathError::Down("the line is dead".into())
}

fn unfit() -> PathError {
    PathError::Unfit("the wrong kind".into())
}

#[test]
fn a_peer_is_unreachable_when_a_transport_that_is_fit_lost_it() {
    for says in [[down(), down()], [unfit(), down()], [down(), unfit()]] {
        let error = told(says.clone());
        assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
        for (door, said) in DOORS.iter().zip(says) {
            assert!(error.to_string().contains(&format!("{door}: {said}")), "{error}");
        }
    }
}

#[test]
fn no_transport_is_said_of_a_peer_that_is_there_when_each_is_unfit() {
    let error = told([unfit(), unfit()]);
    let ConnectError::NoTransport { reasons } = &error else { panic!("{error}") };
    let said = DOORS.map(|door| (door, unfit().to_string()));
    assert!(said.iter().all(|said| reasons.0.contains(said)), "{error}");
}

#[test]
fn past_the_deadline_it_is_the_deadline_whatever_a_transport_says_and_no_other_is_tried() {
    for says in [down(), unfit(), PathError::Down("no answer in time".into())] {
        let second = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&second);
        // On the thread that would tell of the deadline: it can't be first.
        let reader = reader(move |index, peer, opened| {
            count.fetch_add(index, Ordering::Relaxed);
            pause(peer.until.saturating_duration_since(Instant::now()));
            opened(Err(says.clone()));
        });
        let deadline = Duration::from_millis(500);
        let error = wait(connect(&reader, &raw::owner().address.to_string(), deadline)).unwrap_err();
        assert!(matches!(error, ConnectError::Deadline { .. }), "{error}");
        assert_eq!(second.load(Ordering::Relaxed), 0, "the second door was knocked at");
        eventually("no place is lost", || reader.stats().peers == 0);
    }
}

/// Connects to a new owner, as far as a door.
fn knock(reader: &Agent, rung: &Receiver<Opened>) -> (RawOwner, Pending<Result<Peer, ConnectError>>, Opened) {
    let owner = raw::owner();
    let connecting = connect(reader, &owner.address.to_string(), PATIENCE);
    let opened = rung.recv_timeout(PATIENCE).unwrap();
    (owner, connecting, opened)
}

#[test]
fn a_peer_whose_control_session_ends_is_unreachable_whatever_its_transports_say() {
    let path = Arc::new(Dead::default());
    for says in [Err(unfit()), Ok(Arc::<Dead>::clone(&path) as Arc<dyn Path>)] {
        let opens = says.is_ok();
        let (ring, rung) = channel();
        let reader = reader(move |_, _, opened| ring.send(opened).unwrap());
        let (owner, connecting, opened) = knock(&reader, &rung);
        owner.control.recv_timeout(PATIENCE).unwrap().shutdown(Shutdown::Both).unwrap();
        // One thread hears of all sessions, in turn: when another has got that far, the end has been heard.
        drop(knock(&reader, &rung));
        opened(says);
        if !opens {
            rung.recv_timeout(PATIENCE).unwrap()(Err(unfit()));
        }
        let error = wait(connecting).unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("control: ") && (opens || text.contains("the wrong kind")), "{text}");
        eventually("no place is lost", || reader.stats().peers == 0);
    }
    assert_eq!(path.0.load(Ordering::Relaxed), 1, "a path that opened to nobody is closed");
}
