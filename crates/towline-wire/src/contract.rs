//! What a deployment says its KV path must be, and whether a path keeps to it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::receipt::{Evidence, TransportKind};

/// The least a path must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Requirement {
    /// Whatever works.
    #[default]
    Any,
    /// Shared memory of one host, proved.
    SameHost,
    /// Remote direct memory access, proved.
    Rdma,
    /// RDMA straight to and from device memory, proved.
    GpuDirect,
}

/// What happens when a path breaks its contract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnViolation {
    /// The pair is not used.
    #[default]
    Refuse,
    /// The pair is used, with an event, a metric and a mark in each receipt.
    Alarm,
}

/// One deployment's contract.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Contract {
    /// The least a path must be.
    pub require: Requirement,
    /// The least rate in 10⁹ bytes a second, measured over the pair's transfers; 0 for none. See [`Watch`].
    pub min_gb_per_s: f64,
    /// What happens otherwise.
    pub on_violation: OnViolation,
}

impl Contract {
    /// Whether a path over `transport`, shown by `evidence`, is what the contract requires. The rate is not
    /// judged here: at connect there is none yet.
    ///
    /// # Errors
    /// [`ContractViolation`] with what was required and found.
    pub fn admits(&self, transport: TransportKind, evidence: &Evidence) -> Result<(), ContractViolation> {
        let met = match self.require {
            Requirement::Any => true,
            Requirement::SameHost => transport == TransportKind::Shm && evidence.proves(),
            // No transport of this build carries RDMA; `ucx` and `libfabric` will bring their own evidence.
            Requirement::Rdma | Requirement::GpuDirect => false,
        };
        if met {
            return Ok(());
        }
        Err(ContractViolation::Path {
            required: self.require,
            found: transport,
            evidence: evidence.clone(),
            remedy: match self.require {
                Requirement::SameHost => "place both workers on one host and mount the same socket directory",
                _ => {
                    "neither shm nor tcp is RDMA: use a build and a node with ucx or libfabric over a verbs device"
                }
            },
        })
    }
}

/// A pair that is not what its contract requires.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ContractViolation {
    /// The path is of another kind.
    #[error("the contract requires {required:?}, the path is {found} ({evidence}): {remedy}")]
    Path {
        /// What was required.
        required: Requirement,
        /// What there is.
        found: TransportKind,
        /// What shows it.
        evidence: Evidence,
        /// What to do.
        remedy: &'static str,
    },
    /// The path is slower.
    #[error(
        "the contract requires {required} GB/s, the pair moved {found:.3} GB/s over its last {windows} measured stretches: \
         look for a neighbour's load, a slow link or a fallback, or lower min-gb-per-s"
    )]
    Rate {
        /// 10⁹ bytes a second required.
        required: f64,
        /// 10⁹ bytes a second of the fastest of the stretches.
        found: f64,
        /// How many stretches, one after the other, were too slow.
        windows: u32,
    },
}

/// A stretch of transfers tells about a path's rate from this many bytes on: below, what is measured is latency.
pub const JUDGED_BYTES_MIN: u64 = 4 << 20;
/// Stretches in a row that must be too slow before the pair is judged: one may have met a neighbour's burst.
pub const SLOW_WINDOWS: u32 = 3;

/// Follows a pair's rate. A *stretch* is time during which transfers were under way, with the bytes that they moved.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Watch {
    slow: u32,
    fastest: f64,
}

impl Watch {
    /// Takes one stretch of at least [`JUDGED_BYTES_MIN`] bytes (less is ignored).
    ///
    /// # Errors
    /// [`ContractViolation::Rate`] while the last [`SLOW_WINDOWS`] stretches or more were all below the contract's rate.
    pub fn observe(
        &mut self,
        contract: &Contract,
        bytes: u64,
        seconds: f64,
    ) -> Result<(), ContractViolation> {
        let required = contract.min_gb_per_s;
        if required > 0.0 && bytes >= JUDGED_BYTES_MIN && seconds > 0.0 {
            #[expect(clippy::cast_precision_loss, reason = "a rate; 2^53 bytes are exact")]
            let rate = bytes as f64 / seconds / 1e9;
            if rate >= required {
                *self = Self::default();
            } else {
                self.fastest = if self.slow == 0 { rate } else { self.fastest.max(rate) };
                self.slow = self.slow.saturating_add(1);
            }
        }
        if self.slow < SLOW_WINDOWS {
            return Ok(());
        }
        Err(ContractViolation::Rate { required, found: self.fastest, windows: self.slow })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receipt::EvidenceClass;

    #[test]
    fn tcp_never_passes_for_rdma_or_same_host() {
        let evidence = Evidence { class: EvidenceClass::LibraryExact, source: "socket".into() };
        for require in [Requirement::Rdma, Requirement::GpuDirect, Requirement::SameHost] {
            let contract = Contract { require, ..Contract::default() };
            let violation = contract.admits(TransportKind::Tcp, &evidence).unwrap_err();
            assert!(violation.to_string().contains("tcp"), "{violation}");
        }
        assert!(Contract::default().admits(TransportKind::Tcp, &evidence).is_ok());
    }

    #[test]
    fn one_host_is_a_mapping_that_is_proved() {
        let contract = Contract { require: Requirement::SameHost, ..Contract::default() };
        let evidence = |class| Evidence { class, source: "mapping".into() };
        let admits = |class| contract.admits(TransportKind::Shm, &evidence(class)).is_ok();
        assert!(admits(EvidenceClass::LibraryExact) && admits(EvidenceClass::Counters));
        assert!(!admits(EvidenceClass::LibraryCapability) && !admits(EvidenceClass::None));
    }

    #[test]
    fn a_pair_is_too_slow_after_three_slow_stretches_until_a_fast_one() {
        let contract = Contract { min_gb_per_s: 2.0, ..Contract::default() };
        let mut watch = Watch::default();
        let mut observe = |gb_per_s: f64| watch.observe(&contract, 8 << 20, 0.008_388_608 / gb_per_s);
        assert!([1.0, 1.5].into_iter().all(|rate| observe(rate).is_ok()));
        let violation = observe(0.5).unwrap_err();
        assert!(
            matches!(violation, ContractViolation::Rate { windows: 3, found, .. } if (found - 1.5).abs() < 1e-9)
        );
        assert!(violation.to_string().contains("requires 2 GB/s"), "{violation}");
        assert!(observe(1.0).is_err() && observe(2.5).is_ok() && observe(1.0).is_ok());
    }

    #[test]
    fn small_stretches_and_contracts_without_a_rate_judge_nothing() {
        let contract = Contract { min_gb_per_s: 2.0, ..Contract::default() };
        let mut watch = Watch::default();
        for _ in 0..10 {
            assert!(watch.observe(&contract, JUDGED_BYTES_MIN - 1, 1.0).is_ok());
            assert!(watch.observe(&Contract::default(), 1 << 30, 1.0).is_ok());
        }
    }
}
