//! What `up` tells: where to send requests, each transfer's receipt in a line, the answer to `--prompt`.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::deployment::Started;
use super::ears::{LogLine, Progress};
use super::prompt::Answer;
use crate::cli::{Format, Global, UpArgs};
use crate::out;
use crate::progress::Bars;

/// The part of a receipt that is told in a line and in `--prompt`'s JSON.
#[derive(Debug, Deserialize, Serialize)]
struct Summary {
    transport: String,
    bytes: u64,
    blocks: u64,
    seconds: f64,
    gb_per_s: f64,
    lease: Option<u64>,
    verified_by: String,
}

/// `--prompt`'s JSON.
#[derive(Serialize)]
struct AnswerJson<'a> {
    text: &'a str,
    token_ids: &'a [u32],
    ttft_ms: Option<f64>,
    itl_ms: Option<f64>,
    prompt_tokens_computed: Computed,
    receipt: Option<Summary>,
}

#[derive(Serialize)]
struct Computed {
    prefill: u64,
    decode: u64,
}

/// Writes for the one who started `up`.
pub(crate) struct Reporter {
    format: Format,
    listen: std::net::SocketAddr,
    aggregated: bool,
    bars: Bars,
}

impl Reporter {
    pub(crate) fn new(global: &Global, args: &UpArgs) -> Self {
        let bars = Bars::new(global.format);
        Self { format: global.format, listen: args.listen, aggregated: args.aggregated, bars }
    }

    /// Says what is being started.
    pub(crate) fn starting(&self) {
        if self.format == Format::Human {
            let what =
                if self.aggregated { "an aggregated worker" } else { "a prefill worker, a decode worker" };
            out::remark(&format!("starting {what} and a router"));
        }
    }

    /// A child's start goes on.
    pub(crate) fn progress(&self, child: &'static str, progress: &Progress) {
        self.bars.set(child, progress);
    }

    /// A child's log line that is worth showing.
    pub(crate) fn log(&self, line: &LogLine) {
        self.bars.pause(|| line.show());
    }

    /// All are ready: the bars go.
    pub(crate) fn loaded(&self) {
        self.bars.clear();
    }

    /// Says where to send requests.
    pub(crate) fn ready(&self, started: &Started) -> Result<()> {
        let base = &started.http;
        if self.format == Format::Json {
            return out::line(
                &json!({ "event": "listening", "http": base, "model": started.model }).to_string(),
            );
        }
        if self.listen.port() != 0 && *base != format!("http://{}", self.listen) {
            out::line(&format!("port {} is taken: using another", self.listen.port()))?;
        }
        out::line(&format!(
            "send requests to {base}/v1/chat/completions (model {:?}); Ctrl-C stops everything",
            started.model
        ))
    }

    /// One transfer's receipt, in a line.
    pub(crate) fn transfer(&self, receipt: &Value) -> Result<()> {
        let summary: Summary = Deserialize::deserialize(receipt).context("a receipt of an unknown form")?;
        match self.format {
            Format::Human => out::line(&summary.line()),
            Format::Json => {
                let request = &receipt["request_id"];
                out::line(
                    &json!({ "event": "kv_transfer", "request_id": request, "receipt": summary }).to_string(),
                )
            }
        }
    }

    /// The answer to `--prompt`.
    pub(crate) fn answer(&self, answer: &Answer) -> Result<()> {
        let receipt: Option<Summary> = answer
            .receipt
            .as_ref()
            .map(Deserialize::deserialize)
            .transpose()
            .context("a receipt of an unknown form")?;
        if self.format == Format::Human {
            out::line(&answer.text)?;
            return receipt.map_or(Ok(()), |receipt| out::line(&receipt.line()));
        }
        let (prefill, decode) = answer.computed;
        let json = AnswerJson {
            text: &answer.text,
            token_ids: &answer.token_ids,
            ttft_ms: answer.ttft.map(millis),
            itl_ms: answer.itl.map(millis),
            prompt_tokens_computed: Computed { prefill, decode },
            receipt,
        };
        out::line(&serde_json::to_string(&json).context("can't write the answer as JSON")?)
    }
}

impl Summary {
    fn line(&self) -> String {
        let lease = self.lease.map_or_else(String::new, |lease| format!(", lease {lease}"));
        format!(
            "kv over {}: {} in {} {}, {:.2} ms, {:.2} GB/s{lease}, verified by {}",
            self.transport,
            megabytes(self.bytes),
            self.blocks,
            if self.blocks == 1 { "block" } else { "blocks" },
            self.seconds * 1e3,
            self.gb_per_s,
            self.verified_by
        )
    }
}

/// Decimal, like the rate beside it.
fn megabytes(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mb = bytes as f64 / 1e6;
    format!("{mb:.3} MB")
}

/// Milliseconds, to a microsecond.
fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receipt_fits_in_a_line() {
        let receipt = json!({
            "schema": 1, "transport": "shm", "bytes": 46_080_000, "blocks": 125, "seconds": 0.0061, "gb_per_s": 7.554,
            "lease": 3, "verified_by": "mapping", "rails": [], "evidence": {},
        });
        let summary: Summary = serde_json::from_value(receipt).unwrap();
        let line = "kv over shm: 46.080 MB in 125 blocks, 6.10 ms, 7.55 GB/s, lease 3, verified by mapping";
        assert_eq!(summary.line(), line);
        let keys: Value = serde_json::to_value(&summary).unwrap();
        assert_eq!(keys.as_object().unwrap().len(), 7);
    }
}
