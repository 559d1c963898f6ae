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
    /// Shared memory of one host.
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
    /// The least rate in 10⁹ bytes a second, measured; 0 for none. In the vocabulary from the first wire version;
    /// nothing enforces it yet, so no flag sets it.
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
            Requirement::SameHost => transport == TransportKind::Shm,
            // No transport of this build carries RDMA; `ucx` and `libfabric` will bring their own evidence.
            Requirement::Rdma | Requirement::GpuDirect => false,
        };
        if met {
            return Ok(());
        }
        Err(ContractViolation {
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

/// A path that is not what its contract requires.
#[derive(Clone, Debug, Error, PartialEq)]
#[error("the contract requires {required:?}, the path is {found} ({evidence}): {remedy}")]
pub struct ContractViolation {
    /// What was required.
    pub required: Requirement,
    /// What there is.
    pub found: TransportKind,
    /// What shows it.
    pub evidence: Evidence,
    /// What to do.
    pub remedy: &'static str,
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
}
