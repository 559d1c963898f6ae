//! An earlier run as the measure of this one.
//!
//! The file is what `--format json` printed. Rows are the same case when everything but the figures is equal. A case is
//! a regression when its GB/s fell by more than the tolerance; what one side has and the other hasn't is said.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::SCHEMA;
use super::row::Row;

/// The fields that make two rows the same case.
const IDENTITY: [&str; 13] = [
    "transport",
    "op",
    "pattern",
    "peers",
    "batch",
    "order",
    "size_bytes",
    "block_bytes",
    "model",
    "isl",
    "reshard",
    "copy_threads",
    "tcp_streams",
];

/// The rows of a file.
pub(crate) struct Baseline(Vec<Value>);

/// What can be compared of an earlier row.
#[derive(Deserialize)]
struct Figures {
    gb_per_s: f64,
    limit_gb_per_s: Option<f64>,
}

/// One case, then and now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Change {
    pub(crate) title: String,
    /// GB/s then; null if the baseline hasn't the case.
    pub(crate) gb_per_s_before: Option<f64>,
    pub(crate) gb_per_s: f64,
    /// Now over then.
    pub(crate) ratio: Option<f64>,
    /// The same of the limit: it tells a slower machine from slower code.
    pub(crate) limit_ratio: Option<f64>,
    pub(crate) regression: bool,
}

/// All cases, then and now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Comparison {
    /// Percent by which a case may be slower.
    pub(crate) tolerance: u8,
    pub(crate) changes: Vec<Change>,
    /// Rows of the baseline that this run hasn't.
    pub(crate) not_run: usize,
}

impl Comparison {
    /// Cases that are too slow.
    pub(crate) fn regressions(&self) -> usize {
        self.changes.iter().filter(|change| change.regression).count()
    }
}

impl Baseline {
    /// Reads the rows of a file; its other lines are passed over.
    ///
    /// # Errors
    /// When it can't be read, isn't JSON lines, is of another schema, or has no row.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("can't read the baseline {}", file.display()))?;
        Self::parse(&text).with_context(|| format!("in the baseline {}", file.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut rows = Vec::new();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let value: Value =
                serde_json::from_str(line).with_context(|| format!("line {number}: not JSON"))?;
            // The header and comparisons have no rate.
            if value.get("gb_per_s").is_none() || value.get("transport").is_none() {
                continue;
            }
            let schema = value.get("schema").and_then(Value::as_u64);
            ensure!(schema == Some(SCHEMA.into()), "line {number}: schema {schema:?}, this is {SCHEMA}");
            serde_json::from_value::<Figures>(value.clone()).with_context(|| format!("line {number}"))?;
            rows.push(value);
        }
        ensure!(!rows.is_empty(), "no rows: it should be what `towline bench kv --format json` printed");
        Ok(Self(rows))
    }

    /// Puts each row beside the same case of the baseline.
    ///
    /// # Errors
    /// When no row has one: nothing compared is not fine.
    pub(crate) fn compare(&self, rows: &[Row], tolerance: u8) -> Result<Comparison> {
        let least = 1.0 - f64::from(tolerance) / 100.0;
        let (mut changes, mut found) = (Vec::new(), vec![false; self.0.len()]);
        for row in rows {
            let now = serde_json::to_value(row)?;
            // What an earlier version didn't write is null.
            let field = |row: &Value, field: &str| row.get(field).cloned().unwrap_or_default();
            let same = |then: &Value| IDENTITY.iter().all(|name| field(then, name) == field(&now, name));
            // The last of several: a file may have grown by appending.
            let place = self.0.iter().rposition(same);
            let before = match place {
                Some(place) => {
                    self.0
                        .iter()
                        .zip(&mut found)
                        .filter(|(then, _)| same(then))
                        .for_each(|(_, found)| *found = true);
                    Some(serde_json::from_value::<Figures>(self.0[place].clone())?)
                }
                None => None,
            };
            let ratio =
                before.as_ref().filter(|then| then.gb_per_s > 0.0).map(|then| row.gb_per_s / then.gb_per_s);
            let limits = before.as_ref().and_then(|then| then.limit_gb_per_s).zip(row.limit_gb_per_s);
            changes.push(Change {
                title: row.title(),
                gb_per_s_before: before.as_ref().map(|then| then.gb_per_s),
                gb_per_s: row.gb_per_s,
                ratio,
                limit_ratio: limits.filter(|(then, _)| *then > 0.0).map(|(then, now)| now / then),
                regression: ratio.is_some_and(|ratio| ratio < least),
            });
        }
        if changes.iter().all(|change| change.ratio.is_none()) {
            bail!("no case of this run is in the baseline: nothing was compared");
        }
        Ok(Comparison { tolerance, changes, not_run: found.iter().filter(|found| !**found).count() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::tests::sample;

    fn file(rows: &[Row]) -> String {
        let lines: Vec<String> = rows.iter().map(|row| serde_json::to_string(row).unwrap()).collect();
        format!("{{\"schema\":1,\"kind\":\"machine\"}}\n{}\n", lines.join("\n"))
    }

    fn compare(before: f64, now: f64) -> Comparison {
        let baseline = Baseline::parse(&file(&[sample(before, Some(10.0))])).unwrap();
        baseline.compare(&[sample(now, Some(8.0))], 30).unwrap()
    }

    #[test]
    fn slower_than_the_tolerance_is_a_regression() {
        assert_eq!(compare(10.0, 6.9).regressions(), 1);
        assert_eq!(compare(10.0, 7.1).regressions(), 0);
        assert_eq!(compare(1.0, 9.0).regressions(), 0);
        let change = compare(10.0, 5.0).changes.remove(0);
        assert!(
            (change.ratio.unwrap() - 0.5).abs() < 1e-3 && (change.limit_ratio.unwrap() - 0.8).abs() < 1e-3
        );
    }

    #[test]
    fn cases_of_one_side_only_are_told() {
        let mut other = sample(5.0, None);
        other.op = "write";
        let baseline = Baseline::parse(&file(&[sample(5.0, None), other.clone()])).unwrap();
        let mut new = sample(5.0, None);
        new.batch = 4;
        let comparison = baseline.compare(&[sample(5.0, None), new.clone()], 30).unwrap();
        assert_eq!((comparison.not_run, comparison.changes[1].ratio), (1, None));
        let error = baseline.compare(&[new], 30).unwrap_err();
        assert!(error.to_string().contains("nothing was compared"));
    }

    #[test]
    fn files_that_are_no_baseline_are_refused() {
        for (text, part) in [
            ("", "no rows"),
            ("{\"kind\":\"machine\"}", "no rows"),
            ("GB/s 7", "line 1: not JSON"),
            ("{\"schema\":9,\"transport\":\"shm\",\"gb_per_s\":1}", "schema"),
            ("{\"schema\":1,\"transport\":\"shm\",\"gb_per_s\":\"fast\"}", "line 1"),
        ] {
            let error = format!("{:#}", Baseline::parse(text).map(|_| ()).expect_err(text));
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
