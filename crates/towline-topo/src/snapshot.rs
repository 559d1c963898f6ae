//! Everything this crate reads, at one moment, with what could not be read.

use serde::{Deserialize, Serialize};

use crate::gap::Gaps;
use crate::place::Place;
use crate::rdma::{self, RdmaPort};
use crate::reader::Reader;
use crate::system::System;

/// Schema number of a snapshot in JSON. A field that is added leaves it; one that changes its meaning raises it.
pub const SNAPSHOT_SCHEMA: u32 = 1;

/// A machine at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`SNAPSHOT_SCHEMA`] of the one who read it.
    pub schema: u32,
    /// Where the reading process ran.
    pub place: Place,
    /// The RDMA ports, by device and number. None without a gap means that the kernel has no RDMA at all.
    pub rdma_ports: Vec<RdmaPort>,
    /// What is not known.
    pub gaps: Gaps,
}

impl Snapshot {
    /// Reads a machine. It never fails: in the worst case all is gaps.
    pub fn read(system: &dyn System) -> Self {
        let mut reader = Reader::new(system);
        let place = Place::read_with(&mut reader);
        let rdma_ports = rdma::read_with(&mut reader);
        Self { schema: SNAPSHOT_SCHEMA, place, rdma_ports, gaps: reader.gaps }
    }
}
