//! Connections: accepted, bounded, and ended in order.
//!
//! hyper is driven by hand because a server for strangers needs bounds that `axum::serve` does not offer: connections,
//! header fields, bytes and time of a request's head, and the time that a shutdown may take.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::front::HttpLimits;

/// Rest after a failed accept: it fails when files are short, and then fails again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves `router` on `listener` until `stop`, then lets connections finish what they have begun for at most
/// `limits.drain`. Returns how many had to be cut.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: HttpLimits,
    stop: CancellationToken,
) -> usize {
    let permits = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    let builder = builder(&limits);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            (stream, permit) = accept(&listener, &permits) => {
                connections.spawn(connection(stream, permit, builder.clone(), router.clone(), stop.clone()));
            }
        }
    }
    drop(listener);
    drain(connections, limits.drain).await
}

fn builder(limits: &HttpLimits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_headers(limits.headers)
        .max_buf_size(limits.head_bytes.max(8192)); // hyper's least
    builder
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> (TcpStream, Option<OwnedSemaphorePermit>) {
    // The semaphore is never closed.
    let permit = Arc::clone(permits).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) => {
                if !is_of_one_connection(&error) {
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

async fn connection(
    stream: TcpStream,
    permit: Option<OwnedSemaphorePermit>,
    builder: http1::Builder,
    router: Router,
    stop: CancellationToken,
) {
    // Tokens are small writes; waiting to join them would show.
    _ = stream.set_nodelay(true);
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let request: Request = request.map(Body::new);
        router.clone().oneshot(request)
    });
    let mut serving = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
    drop(permit);
}

async fn drain(mut connections: JoinSet<()>, patience: Duration) -> usize {
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(patience, all).await.is_ok() {
        return 0;
    }
    let cut = connections.len();
    connections.shutdown().await;
    cut
}
