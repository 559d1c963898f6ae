//! When to stop: SIGINT, SIGTERM, or (for a child of `up`) the end of standard input.
//!
//! A child holds one end of a pipe whose other end only its parent has. However the parent dies, even by SIGKILL,
//! the kernel closes it and the child sees the end of its input: no child outlives `up`. A second signal, while
//! open requests are being finished, ends the process at once.

use std::io::Read;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// What a stop cuts short beyond its own bound: sockets that don't close.
const GRACE: Duration = Duration::from_secs(2);

/// Cancels the token that it returns at the first signal, and once standard input ends if `with_parent`.
///
/// # Errors
/// When the kernel refuses the handlers.
pub(crate) fn watch(with_parent: bool) -> Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt()).context("can't watch for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("can't watch for SIGTERM")?;
    let stop = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
            _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
            () = stop.cancelled() => {}
        }
        stop.cancel();
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        exit_now("a second signal: not waiting for open requests");
    });
    if with_parent {
        watch_parent(token.clone())?;
    }
    Ok(token)
}

/// A thread, since a read of standard input can't be given up, and must not hold up the runtime's end.
fn watch_parent(token: CancellationToken) -> Result<()> {
    let wait = move || {
        let mut input = std::io::stdin().lock();
        while matches!(input.read(&mut [0; 64]), Ok(1..)) {}
        tracing::info!("standard input ended: stopping with the parent");
        token.cancel();
    };
    std::thread::Builder::new().name("parent-watch".into()).spawn(wait).context("can't start a thread")?;
    Ok(())
}

/// Runs `work`, which ends by itself within `drain` once `token` is cancelled; past that bound it is dropped.
pub(crate) async fn bounded<T>(
    work: impl Future<Output = Result<T>>,
    token: &CancellationToken,
    drain: Duration,
) -> Result<T> {
    tokio::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        () = token.cancelled() => {}
    }
    match tokio::time::timeout(drain + GRACE, work).await {
        Ok(done) => done,
        Err(_) => bail!("open requests did not end within {} s: cut off", (drain + GRACE).as_secs()),
    }
}

#[expect(clippy::exit, reason = "the one way out that waits for nothing")]
fn exit_now(why: &str) {
    crate::out::remark(why);
    std::process::exit(i32::from(crate::FAILURE));
}
