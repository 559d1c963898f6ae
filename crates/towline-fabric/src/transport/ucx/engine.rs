//! The thread that has the worker: opens the library, connects, moves slices, sleeps.
//!
//! Everything here belongs to the thread. Callbacks come from [`Worker::progress`] only, never from inside UCX, and so may close
//! endpoints and post again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towline_ffi::ucx::lanes::Lanes;
use towline_ffi::ucx::{
    self, Batch, Context, ErrorHandling, Mapped, Piece, RemoteKey, Settings, Ucx, UcxError, Worker,
};
use towline_wire::card::Endpoint;
use towline_wire::frame::Status;
use towline_wire::id::RegionId;
use towline_wire::receipt::{Evidence, EvidenceClass, Op, TransportKind};

use super::book::{Local, parse_key};
use super::inbox::{Order, PathId};
use super::path::UcxPath;
use super::settings::UcxConfig;
use super::{FORMAT, Shared};
use crate::agent::Environment;
use crate::io::Spin;
use crate::transport::{Moved, Opened, PathError, PathEvents, PeerAddress, Slice};

/// How long requests may take to end once the thread is to: a close by force takes microseconds.
const LINGER: Duration = Duration::from_secs(2);

/// How long to sleep when UCX can't tell of news: a device has failed, and endpoints will soon say so.
const UNARMED: Duration = Duration::from_millis(1);

/// Starts it.
///
/// # Errors
/// The kernel's.
pub(super) fn start(
    shared: &Arc<Shared>,
    environment: &Arc<Environment>,
    config: UcxConfig,
) -> io::Result<JoinHandle<()>> {
    let (shared, environment) = (Arc::clone(shared), Arc::downgrade(environment));
    std::thread::Builder::new().name("towline-ucx".into()).spawn(move || run(&shared, &environment, &config))
}

fn run(shared: &Arc<Shared>, environment: &Weak<Environment>, config: &UcxConfig) {
    let why = match open(config) {
        Ok((context, worker)) => match Engine::offer(shared, environment, (context, worker)) {
            Ok(mut engine) => {
                engine.run();
                "the agent stopped".to_owned()
            }
            Err(error) => error.to_string(),
        },
        Err(why) => why,
    };
    tracing::info!(transport = %TransportKind::Ucx, reason = why, "transport not available");
    shared.book().close(&why);
    if let Some(environment) = environment.upgrade() {
        environment.withdraw(TransportKind::Ucx);
    }
    refuse(shared, &why);
}

/// Opens library, context and worker.
fn open(config: &UcxConfig) -> Result<(Arc<Context>, Worker), String> {
    let ucx = Arc::new(Ucx::open(config.library.as_deref()).map_err(|error| error.to_string())?);
    tracing::info!(path = %ucx.path().display(), version = %ucx.version(), origin = ?ucx.origin(), "UCX opened");
    let opened = Settings::read(&ucx).and_then(|mut settings| {
        config.apply(&mut settings)?;
        let context = Context::new(&settings, "towline")?;
        Ok((Arc::clone(&context), Worker::new(&context)?))
    });
    opened.map_err(|error| format!("UCX {} of {}: {error}", ucx.version(), ucx.path().display()))
}

/// Answers all that comes, until the transport goes, that there is none.
fn refuse(shared: &Shared, why: &str) {
    loop {
        while let Some(order) = shared.inbox.take() {
            match order {
                Order::Connect { opened, .. } => opened(Err(PathError::Unfit(why.into()))),
                Order::Post(_, slice) => slice.complete(Err(PathError::Closed(why.into()))),
                Order::Close(_) | Order::Forget(_) => {}
            }
        }
        if shared.inbox.is_closed() {
            return;
        }
        if let Some(event) = shared.inbox.sleep() {
            _ = poll(&mut [PollFd::from_borrowed_fd(event, PollFlags::IN)], None);
            shared.inbox.awake();
        }
    }
}

type Paths = Rc<RefCell<BTreeMap<PathId, Live>>>;

struct Engine {
    shared: Arc<Shared>,
    // Before the worker: fields are dropped in this order, and what stands on a worker goes first.
    paths: Paths,
    local: Local,
    worker: Worker,
    last: PathId,
    /// Slices that UCX has.
    in_flight: Rc<Cell<usize>>,
    spin: Spin,
}

/// A path that is open, or opening.
struct Live {
    endpoint: ucx::Endpoint,
    keys: BTreeMap<RegionId, Key>,
    events: Arc<dyn PathEvents>,
    opening: Option<(Opened, Instant)>,
}

/// What a peer's region takes.
struct Key {
    base: u64,
    remote: RemoteKey,
    writable: bool,
}

impl Engine {
    /// Has the agent's card offer it.
    fn offer(
        shared: &Arc<Shared>,
        environment: &Weak<Environment>,
        (context, worker): (Arc<Context>, Worker),
    ) -> Result<Self, UcxError> {
        let endpoint = [&[FORMAT][..], &worker.address()?].concat();
        worker.event_fd()?;
        let keys = shared.book().open(&context);
        if let Some(environment) = environment.upgrade() {
            environment.offer(Endpoint { transport: TransportKind::Ucx, address: endpoint }, keys);
        }
        Ok(Self {
            shared: Arc::clone(shared),
            paths: Paths::default(),
            local: Local::new(&context),
            worker,
            last: PathId(0),
            in_flight: Rc::default(),
            spin: Spin::default(),
        })
    }

    fn run(&mut self) {
        while !self.shared.inbox.is_closed() {
            while let Some(order) = self.shared.inbox.take() {
                self.handle(order);
            }
            self.give_up(Instant::now());
            if self.worker.progress() == 0 {
                self.wait();
            }
        }
        let end = Instant::now() + LINGER;
        let live = std::mem::take(&mut *self.paths.borrow_mut());
        live.values().for_each(|live| live.endpoint.close());
        drop(live);
        while self.in_flight.get() > 0 && Instant::now() < end {
            self.worker.progress();
        }
    }

    fn handle(&mut self, order: Order) {
        match order {
            Order::Connect { peer, opened } => {
                self.last.0 += 1;
                if let Err((error, opened)) = self.connect(self.last, &peer, opened) {
                    opened(Err(error));
                }
            }
            Order::Post(id, slice) => {
                if let Err((error, slice)) = self.post(id, slice) {
                    slice.complete(Err(error));
                }
            }
            Order::Close(id) => {
                if let Some(live) = self.remove(id) {
                    live.endpoint.close();
                }
            }
            Order::Forget(id) => drop(self.remove(id)),
        }
    }

    fn remove(&self, id: PathId) -> Option<Live> {
        self.paths.borrow_mut().remove(&id)
    }

    /// Begins to open a path. It is open when the peer has answered.
    fn connect(&self, id: PathId, peer: &PeerAddress, opened: Opened) -> Result<(), (PathError, Opened)> {
        let address = match peer.card.endpoint(TransportKind::Ucx) {
            Some([FORMAT, address @ ..]) => address,
            Some([]) => return Err((PathError::Opening("the peer"), opened)),
            Some(_) => {
                return Err((PathError::Unfit("the peer's address is of another format".into()), opened));
            }
            None => return Err((PathError::Unfit("the peer does not offer it".into()), opened)),
        };
        let paths = Rc::clone(&self.paths);
        let lost = Box::new(move |outcome: Result<(), UcxError>| end(&paths, id, outcome.err()));
        let endpoint = match ucx::Endpoint::connect(&self.worker, address, ErrorHandling::Peer, lost) {
            Ok(endpoint) => endpoint,
            Err(error) => return Err((PathError::Unfit(error.to_string()), opened)),
        };
        let keys = peer.card.regions.iter().filter_map(|region| {
            let (_, key) = region.keys.iter().find(|(kind, _)| *kind == TransportKind::Ucx)?;
            let (base, key) = parse_key(key)?;
            let remote = endpoint.unpack(key).inspect_err(|error| {
                tracing::info!(peer = %peer.card.agent, region = %region.id, %error, "region not reached over ucx");
            });
            Some((region.id, Key { base, remote: remote.ok()?, writable: region.peer_writable }))
        });
        let keys = keys.collect();
        let (flushed, shared) = (endpoint.clone(), Arc::clone(&self.shared));
        let paths = Rc::clone(&self.paths);
        let answered = Box::new(move |outcome: Result<(), UcxError>| match outcome {
            Ok(()) => handle_answer(&paths, id, &shared),
            Err(error) => end(&paths, id, Some(error)),
        });
        let (events, opening) = (Arc::clone(&peer.events), Some((opened, peer.until)));
        self.paths.borrow_mut().insert(id, Live { endpoint, keys, events, opening });
        Batch::of(&flushed, answered).flush();
        Ok(())
    }

    /// Posts a slice's pieces.
    fn post(&mut self, id: PathId, slice: Slice) -> Result<(), (PathError, Slice)> {
        if !slice.is_wanted() {
            return Err((PathError::Unwanted, slice));
        }
        let (mapped, base, remote) = match self.ends(id, &slice) {
            Ok(ends) => ends,
            Err(error) => return Err((error, slice)),
        };
        let (op, runs, in_flight) = (slice.op(), slice.shared_runs(), Rc::clone(&self.in_flight));
        in_flight.set(in_flight.get() + 1);
        let ended = Box::new(move |outcome: Result<(), UcxError>| {
            in_flight.set(in_flight.get() - 1);
            let moved = Moved { bytes: slice.bytes(), rail: 0 };
            slice.complete(outcome.map(|()| moved).map_err(|error| PathError::Down(error.to_string())));
        });
        let batch = Batch::between(mapped, remote, ended);
        for run in runs.iter() {
            // Lengths of memory of this process: they fit.
            let (Ok(local_offset), Ok(len)) = (usize::try_from(run.local), usize::try_from(run.len)) else {
                break;
            };
            let piece = Piece { local_offset, remote_address: base.saturating_add(run.remote), len };
            match op {
                Op::Read => batch.get(piece),
                Op::Write => batch.put(piece),
            }
            if batch.has_failed() {
                break;
            }
        }
        if op == Op::Write {
            batch.flush();
        }
        Ok(())
    }

    /// The two memories of a slice.
    fn ends(&mut self, id: PathId, slice: &Slice) -> Result<(Arc<Mapped>, u64, RemoteKey), PathError> {
        let paths = self.paths.borrow();
        let live = paths.get(&id).ok_or_else(|| PathError::Closed("the path was closed".into()))?;
        let key = live.keys.get(&slice.region()).ok_or(PathError::Refused(Status::UnknownRegion))?;
        if slice.op() == Op::Write && !key.writable {
            return Err(PathError::Refused(Status::NotWritable));
        }
        let gone = || PathError::Down("the slice has no memory".into());
        let mapped = self.local.map(slice.local().ok_or_else(gone)?);
        let mapped = mapped.map_err(|error| PathError::Unfit(format!("{error}; see ulimit -l")))?;
        let mapped =
            mapped.ok_or_else(|| PathError::Unfit("a file's memory can't be used over ucx".into()))?;
        Ok((mapped, key.base, key.remote.clone()))
    }

    /// Ends what has been opening for too long.
    fn give_up(&self, now: Instant) {
        let late = |(id, live): (&PathId, &Live)| {
            live.opening.as_ref().filter(|(_, until)| *until <= now).map(|_| *id)
        };
        let late: Vec<_> = self.paths.borrow().iter().filter_map(late).collect();
        late.into_iter().for_each(|id| end(&self.paths, id, None));
    }

    /// Looks around, then sleeps until there is something to do.
    fn wait(&mut self) {
        let (worker, inbox) = (&self.worker, &self.shared.inbox);
        if self.spin.look(|| worker.progress() > 0 || inbox.has_news()) {
            return;
        }
        let armed = worker.arm();
        if armed == Ok(false) {
            return;
        }
        let (Ok(events), Some(news)) = (worker.event_fd(), inbox.sleep()) else { return };
        let slept = Instant::now();
        let opening = self.paths.borrow().values().filter_map(|live| Some(live.opening.as_ref()?.1)).min();
        // One that can't be armed may have news without telling.
        let until = if armed.is_ok() { opening } else { Some(slept + UNARMED) };
        let timeout =
            until.map(|until| Timespec::try_from(until.saturating_duration_since(slept)).unwrap_or_default());
        let mut files = [events, news].map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
        // Interrupted is as good as woken.
        _ = poll(&mut files, timeout.as_ref());
        inbox.awake();
        self.spin.handle_sleep(slept.elapsed());
    }
}

/// The peer has answered: the path is open.
fn handle_answer(paths: &Paths, id: PathId, shared: &Arc<Shared>) {
    let answered = paths
        .borrow_mut()
        .get_mut(&id)
        .and_then(|live| Some((live.opening.take()?.0, live.endpoint.lanes())));
    let Some((opened, lanes)) = answered else { return };
    let (evidence, rails) = match lanes {
        Ok(Some(lanes)) => describe(&lanes),
        Ok(None) | Err(_) => {
            (Evidence { class: EvidenceClass::None, source: "library".into() }, vec!["ucx".into()])
        }
    };
    opened(Ok(Arc::new(UcxPath { shared: Arc::clone(shared), id, evidence, rails })));
}

/// Lanes show what the library can use, not yet what it used.
fn describe(lanes: &Lanes) -> (Evidence, Vec<String>) {
    let names: Vec<_> =
        lanes.lanes.iter().map(|lane| format!("{}/{}", lane.transport, lane.device)).collect();
    (Evidence { class: EvidenceClass::LibraryCapability, source: "library".into() }, vec![names.join("+")])
}

/// A path is over: its endpoint failed, or it took too long to open.
fn end(paths: &Paths, id: PathId, why: Option<UcxError>) {
    let Some(live) = paths.borrow_mut().remove(&id) else { return };
    live.endpoint.close();
    let reason = why.map_or_else(|| "no answer in time".into(), |error| error.to_string());
    match live.opening {
        Some((opened, _)) => opened(Err(PathError::Down(reason))),
        None => live.events.handle_down(&PathError::Down(reason)),
    }
}
