//! The router in front of scripted workers, over real sockets on loopback.

#![allow(clippy::unwrap_used, reason = "a test that unwraps an error has failed, and says where")]

mod cancel;
mod crowd;
mod deployment;
mod faults;
mod limits;
mod mock;
mod stream;
mod surface;
mod wire;

use std::future::Future;
use std::time::Duration;

/// Waits for an event that must come. The deadline is generous: it is there to fail, not to measure.
async fn within<F: Future>(event: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), event).await.expect("no event within 20 s")
}

/// A port of our own.
fn loopback() -> tokio::net::TcpListener {
    towline_router::bind(([127, 0, 0, 1], 0).into()).unwrap()
}
