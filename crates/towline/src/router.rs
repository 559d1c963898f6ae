//! `towline router`: flags to `towline_router::Config`, a socket, one ready line, and a bounded stop.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::net::TcpListener;
use towline_router::{Config, Limits, Router};

use crate::cli::{Format, Global, RouterArgs};
use crate::{out, stop};

pub(crate) fn run(global: &Global, args: RouterArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("can't start")?;
    let outcome = runtime.block_on(serve(global.format, args));
    runtime.shutdown_background();
    outcome
}

async fn serve(format: Format, args: RouterArgs) -> Result<()> {
    let drain = Duration::from_secs(args.stop.drain_seconds);
    let token = stop::watch(args.stop.stop_with_parent)?;
    let (listen, any_port) = (args.listen, args.any_port);
    let config = config(args)?;
    let listener = bind(listen, any_port).await?;
    let address = listener.local_addr().context("can't read the address that was bound")?;
    announce(format, address)?;
    let work =
        async { Router::new(config).serve(listener, token.clone()).await.context("the router failed") };
    stop::bounded(work, &token, drain).await
}

fn config(args: RouterArgs) -> Result<Config> {
    let pair = !args.prefill.is_empty() && !args.decode.is_empty();
    if !pair && args.aggregated.is_empty() {
        bail!("no workers to send requests to: give --prefill URL and --decode URL, or --aggregated URL");
    }
    let limits = Limits {
        body_bytes_max: usize::try_from(args.max_body.0)
            .context("--max-body is more than this machine addresses")?,
        requests_in_flight_max: args.max_requests as usize,
        prefill_timeout: Duration::from_secs(args.prefill_seconds),
        drain_timeout: Duration::from_secs(args.stop.drain_seconds),
        ..Limits::default()
    };
    Ok(Config {
        prefill: args.prefill,
        decode: args.decode,
        aggregated: args.aggregated,
        forward_authorization: args.forward_authorization,
        limits,
    })
}

/// Binds `listen`, or any port of its address when that one is taken and `any_port` allows it.
async fn bind(listen: SocketAddr, any_port: bool) -> Result<TcpListener> {
    match TcpListener::bind(listen).await {
        Err(error) if any_port && error.kind() == ErrorKind::AddrInUse => {
            TcpListener::bind(SocketAddr::new(listen.ip(), 0)).await.context("no port is free")
        }
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            bail!("{listen} is taken: give another --listen, or port 0 for any free one")
        }
        bound => bound.with_context(|| format!("can't listen on {listen}")),
    }
}

fn announce(format: Format, address: SocketAddr) -> Result<()> {
    out::line(&match format {
        Format::Human => format!("listening on http://{address}"),
        Format::Json => json!({ "event": "listening", "http": format!("http://{address}") }).to_string(),
    })
}
