//! As little of an HTTP client as `up` needs: one request, one connection, on loopback.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// Largest answer read whole, bytes: a metrics page has tens of KiB.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Sends one request to `base` (`http://host:port`).
pub(crate) async fn send(
    base: &str,
    mut request: http::Request<Full<Bytes>>,
) -> Result<http::Response<Incoming>> {
    let authority = base.strip_prefix("http://").with_context(|| format!("not an http address: {base}"))?;
    let stream = TcpStream::connect(authority).await.with_context(|| format!("can't reach {base}"))?;
    stream.set_nodelay(true).context("can't set TCP_NODELAY")?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.context("no HTTP connection")?;
    tokio::spawn(connection);
    request.headers_mut().insert(http::header::HOST, authority.parse().context("not a host")?);
    sender.send_request(request).await.with_context(|| format!("no answer from {base}"))
}

/// The whole body of an answer, as text.
pub(crate) async fn text(response: http::Response<Incoming>) -> Result<String> {
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let bytes = body.map_err(|error| anyhow::anyhow!("the answer broke off: {error}"))?.to_bytes();
    String::from_utf8(bytes.into()).context("the answer is not text")
}

/// GET `path`; anything but 200 is an error with the answer in it.
pub(crate) async fn get(base: &str, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Full::default()).context("not a path")?;
    let response = send(base, request).await?;
    let status = response.status();
    let body = text(response).await?;
    if status != http::StatusCode::OK {
        bail!("{base}{path} answered {status}: {body}");
    }
    Ok(body)
}

/// The name of the first model that `base` lists.
pub(crate) async fn first_model(base: &str) -> Result<String> {
    let models: Value =
        serde_json::from_str(&get(base, "/v1/models").await?).context("/v1/models is not JSON")?;
    models["data"][0]["id"].as_str().map(str::to_owned).context("/v1/models lists no model")
}

/// The sum of a counter's samples on the `/metrics` page of `base`; 0 where it has none yet.
pub(crate) async fn counter(base: &str, name: &str) -> Result<u64> {
    let page = get(base, "/metrics").await?;
    Ok(sum_samples(&page, name))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counters are whole and not negative"
)]
fn sum_samples(page: &str, name: &str) -> u64 {
    let samples = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = match rest.strip_prefix('{') {
            Some(labels) => labels.rsplit_once('}')?.1,
            None => rest.strip_prefix(' ')?,
        };
        value.split_whitespace().next()?.parse::<f64>().ok()
    });
    samples.sum::<f64>().round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_one_counter_are_summed() {
        let page =
            "# TYPE t_total counter\nt_total 3\nt_total{a=\"x y\"} 4.0\nt_total_other 9\nt_totals{} 9\n";
        assert_eq!(sum_samples(page, "t_total"), 7);
        assert_eq!(sum_samples(page, "absent"), 0);
    }
}
