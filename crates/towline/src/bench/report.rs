//! What a sweep prints: JSON lines for programs, an aligned table for people, a line as soon as its case is measured.

use anyhow::Result;
use serde_json::{Value, json};

use super::SCHEMA;
use super::baseline::{Change, Comparison};
use super::machine::Machine;
use super::row::Row;
use super::start::Start;
use crate::cli::Format;
use crate::out;

/// Width of the column that names the case.
const TITLE: usize = 48;

/// Writes for whoever started it.
pub(crate) struct Reporter {
    format: Format,
}

impl Reporter {
    pub(crate) fn new(format: Format) -> Self {
        Self { format }
    }

    /// The machine.
    pub(crate) fn machine(&self, machine: &Machine) -> Result<()> {
        if self.format == Format::Json {
            return out::line(&with_kind("machine", &serde_json::to_value(machine)?));
        }
        let unknown = || "unknown".to_owned();
        out::line(&format!(
            "towline {} ({}) on {}, {} cores, Linux {}, {} GiB, huge pages for shared memory: {}, load {}",
            machine.version,
            machine.build,
            machine.cpu.clone().unwrap_or_else(unknown),
            machine.cores,
            machine.kernel.clone().unwrap_or_else(unknown),
            machine.memory_bytes.map_or_else(unknown, |bytes| (bytes >> 30).to_string()),
            machine.thp_shmem.clone().unwrap_or_else(unknown),
            machine.load.map_or_else(unknown, |load| load.to_string()),
        ))?;
        if machine.build == "debug" {
            out::line("a debug build: these figures say nothing about speed")?;
        }
        Ok(())
    }

    /// How long an agent takes to start.
    pub(crate) fn start(&self, start: &Start) -> Result<()> {
        if self.format == Format::Json {
            return out::line(&with_kind("start", &serde_json::to_value(start)?));
        }
        out::line(&format!(
            "an agent's start over {}: {:.2} ms to be ready, {:.2} to connect, {:.2} for the first 4 KiB; in all {:.2}",
            start.transport, start.agent_ms, start.connect_ms, start.first_ms, start.total_ms
        ))
    }

    /// For people, the head of the table.
    pub(crate) fn head(&self) -> Result<()> {
        if self.format == Format::Json {
            return Ok(());
        }
        out::line(
            "GB/s at the median repetition, 10^9 bytes; limit: the best round of the machine's own, a copy for shm, raw",
        )?;
        out::line("streams for tcp; CMA: the same by process_vm_readv or process_vm_writev")?;
        out::line("")?;
        out::line(&head())
    }

    /// A case's result.
    pub(crate) fn row(&self, row: &Row) -> Result<()> {
        match self.format {
            Format::Json => out::line(&serde_json::to_string(row)?),
            Format::Human => {
                out::line(&line(row))?;
                if row.limit_gb_per_s.is_none() {
                    out::line(&format!("    no limit: {}", row.limit.note))?;
                }
                Ok(())
            }
        }
    }

    /// Then and now.
    pub(crate) fn comparison(&self, comparison: &Comparison) -> Result<()> {
        if self.format == Format::Json {
            return out::line(&with_kind("comparison", &serde_json::to_value(comparison)?));
        }
        out::line("")?;
        out::line(&format!("beside the baseline, tolerance {} %:", comparison.tolerance))?;
        for change in &comparison.changes {
            out::line(&change_line(change))?;
        }
        if comparison.not_run > 0 {
            out::line(&format!("    {} rows of the baseline were not run", comparison.not_run))?;
        }
        Ok(())
    }
}

fn with_kind(kind: &str, value: &Value) -> String {
    let mut whole = json!({ "schema": SCHEMA, "kind": kind });
    if let (Some(whole), Some(fields)) = (whole.as_object_mut(), value.as_object()) {
        whole.extend(fields.clone());
    }
    whole.to_string()
}

fn head() -> String {
    format!(
        "{:<TITLE$} {:>7} {:>7} {:>6} {:>7} {:>24} {:>24} {:>8} {:>15} {:>5} {:>8}  {}",
        "case",
        "GB/s",
        "limit",
        "share",
        "CMA",
        "total us p50/p90/p99",
        "prep/post/wire us p50",
        "CPU s/GB",
        "pieces",
        "rails",
        "bytes",
        "evidence"
    )
}

fn line(row: &Row) -> String {
    let optional =
        |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
    let triple = |values: [f64; 3]| values.map(number).join("/");
    let pieces = if row.descriptors == row.descriptors_merged {
        row.descriptors.to_string()
    } else {
        format!("{} > {}", row.descriptors, row.descriptors_merged)
    };
    let evidence = row.receipt.as_ref().map_or_else(String::new, |receipt| receipt.evidence.to_string());
    format!(
        "{:<TITLE$} {:>7.2} {:>7} {:>6} {:>7} {:>24} {:>24} {:>8} {:>15} {:>5} {:>8}  {}",
        row.title(),
        row.gb_per_s,
        optional(row.limit_gb_per_s, 2),
        row.share_of_limit.map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0)),
        optional(row.cma_gb_per_s, 2),
        triple([row.total_us.p50, row.total_us.p90, row.total_us.p99]),
        triple([row.prepare_us.p50, row.post_us.p50, row.wire_us.p50]),
        optional(row.cpu_s_per_gb, 3),
        pieces,
        row.rails,
        if row.verified == "full" { "verified" } else { "unseen" },
        evidence,
    )
}

/// Short, and still three digits.
fn number(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn change_line(change: &Change) -> String {
    let Some((before, ratio)) = change.gb_per_s_before.zip(change.ratio) else {
        return format!("    {:<TITLE$} not in the baseline", change.title);
    };
    let limit = change.limit_ratio.map_or(String::new(), |ratio| format!(", the limit {ratio:.2} times"));
    let verdict = if change.regression { "slower" } else { "fine" };
    format!(
        "    {:<TITLE$} {verdict}: {before:.2} then, {:.2} GB/s now, {ratio:.2} times{limit}",
        change.title, change.gb_per_s
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::tests::sample;

    #[test]
    fn lines_stand_under_their_heads() {
        let (head, line) = (head(), line(&sample(4.0, Some(8.0))));
        let end = |text: &str, word: &str| text.find(word).unwrap() + word.len();
        assert_eq!(end(&head, "GB/s"), end(&line, "4.00"));
        assert_eq!(end(&head, "share"), end(&line, "50 %"));
        assert_eq!(end(&head, "bytes"), end(&line, "verified"));
    }

    #[test]
    fn a_limit_that_is_missing_is_a_dash() {
        assert!(line(&sample(4.0, None)).contains("4.00       -      -"));
    }

    #[test]
    fn headers_carry_kind_and_schema() {
        let line: Value = serde_json::from_str(&with_kind("machine", &json!({ "cores": 2 }))).unwrap();
        assert_eq!(line, json!({ "schema": SCHEMA, "kind": "machine", "cores": 2 }));
    }
}
