//! The shell: accepts connections, bounds them, and lets them end.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Limits;
use crate::stall::Stalling;
use crate::{Router, probe};

/// Hyper's least buffer, bytes.
const HEAD_BYTES_MIN: usize = 8192;
/// After a failed accept (no file descriptors left, as a rule): time for some connection to end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that may wait to be accepted. Tokio's own `bind` lets 128 wait, and a burst beyond that costs each
/// of the rest a second and more (a lost SYN is sent again after 1 s). The kernel caps it at `somaxconn`.
const BACKLOG: u32 = 4096;

/// A listener fit for [`Router::serve`]: one that takes a burst of a few thousand clients.
///
/// # Errors
/// The socket's: address in use, not ours, or not permitted.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restart must not wait for the connections of the last run to be forgotten.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Why [`Router::serve`] gave up. Restarting helps only if the cause is gone.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The listener is no longer one.
    #[error("the listener can't accept connections: {0}")]
    Listener(#[source] io::Error),
    /// Open requests outlived the drain timeout and were cut off; everything else ended well.
    #[error("{connections} connections were still open after the drain timeout and were closed")]
    Drain {
        /// How many.
        connections: usize,
    },
}

impl Router {
    /// Answers on `listener` and probes the workers until `shutdown` is cancelled; then lets open requests end,
    /// for at most [`Limits::drain_timeout`]. Dropping the future closes everything at once.
    ///
    /// # Errors
    /// [`ServeError::Listener`] when accepting fails for good, [`ServeError::Drain`] when requests had to be cut.
    pub async fn serve(&self, listener: TcpListener, shutdown: CancellationToken) -> Result<(), ServeError> {
        let mut tasks = JoinSet::new();
        let stop = shutdown.child_token();
        let (state, probes_stop) = (Arc::clone(&self.state), stop.clone());
        let mut probes = JoinSet::new();
        probes.spawn(async move { probe::run(&state, &probes_stop).await });
        let accepted = self.accept(&listener, &stop, &mut tasks).await;
        // Nobody connects any more, and the open connections learn that their request is the last.
        drop(listener);
        stop.cancel();
        let drained = drain(&mut tasks, self.state.config.limits.drain_timeout).await;
        accepted.and(drained)
    }

    async fn accept(
        &self,
        listener: &TcpListener,
        stop: &CancellationToken,
        tasks: &mut JoinSet<()>,
    ) -> Result<(), ServeError> {
        let limits = &self.state.config.limits;
        let service = TowerToHyperService::new(self.app());
        let places = Arc::new(Semaphore::new(limits.connections_max.clamp(1, Semaphore::MAX_PERMITS)));
        loop {
            let accepted = tokio::select! {
                accepted = next(listener, &places) => accepted,
                Some(_) = tasks.join_next() => continue,
                () = stop.cancelled() => return Ok(()),
            };
            match accepted {
                Ok((stream, place)) => {
                    let connection = connection(stream, service.clone(), limits.clone(), stop.clone());
                    tasks.spawn(async move {
                        connection.await;
                        drop(place);
                    });
                }
                Err(error) if is_fatal(&error) => return Err(ServeError::Listener(error)),
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }
}

async fn next(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

/// The listener itself is broken; anything else (a peer that left, no descriptors) passes.
fn is_fatal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotConnected)
}

async fn connection(
    stream: TcpStream,
    service: TowerToHyperService<axum::Router>,
    limits: Limits,
    stop: CancellationToken,
) {
    // A token is a small write that must not wait for the next one. A socket that refuses still works.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.client_head_timeout)
        .max_buf_size(limits.head_bytes_max.max(HEAD_BYTES_MIN))
        .max_headers(limits.headers_max)
        .serve_connection(TokioIo::new(Stalling::new(stream, limits.client_stall_timeout)), service);
    let mut connection = pin!(connection);
    tokio::select! {
        // How a connection ended is the client's affair; requests are counted elsewhere.
        _ = connection.as_mut() => {}
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

async fn drain(tasks: &mut JoinSet<()>, timeout: Duration) -> Result<(), ServeError> {
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(timeout, all).await.is_ok() {
        return Ok(());
    }
    let connections = tasks.len();
    tasks.shutdown().await;
    Err(ServeError::Drain { connections })
}
