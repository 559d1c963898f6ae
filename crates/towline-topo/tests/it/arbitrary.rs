//! A machine whose every file, folder and link may hold anything: reading it ends, and stays within its bounds.

use std::cell::Cell;

use proptest::prelude::*;
use towline_topo::counters::{CounterSample, delta};
use towline_topo::gap::{GAPS_MAX, Gap, Reason};
use towline_topo::snapshot::Snapshot;
use towline_topo::system::System;

/// Answers each question with the next of some answers, round and round.
struct Arbitrary {
    answers: Vec<Option<String>>,
    asked: Cell<usize>,
}

impl Arbitrary {
    fn answer(&self, path: &str) -> Result<String, Gap> {
        let asked = self.asked.get();
        self.asked.set(asked + 1);
        self.answers[asked % self.answers.len()].clone().ok_or_else(|| Gap::new(path, Reason::Absent))
    }
}

impl System for Arbitrary {
    fn read(&self, path: &str) -> Result<String, Gap> {
        self.answer(path)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Gap> {
        // The folders on the way to a port are always there, so that ports are read at all.
        match path {
            "/sys/class" => Ok(vec!["infiniband".to_owned()]),
            "/sys/class/infiniband" => Ok(vec!["..".to_owned(), "mlx5_0".to_owned(), self.answer(path)?]),
            _ => Ok(vec!["0".to_owned(), "1".to_owned(), self.answer(path)?]),
        }
    }

    fn link(&self, path: &str) -> Result<String, Gap> {
        self.answer(path)
    }
}

fn answer() -> impl Strategy<Value = Option<String>> {
    prop_oneof![
        Just(None),
        any::<String>().prop_map(Some),
        prop_oneof![
            Just("4: ACTIVE"),
            Just("100 Gb/sec (4X EDR)"),
            Just("fe80::1"),
            Just("../../devices/virtual/infiniband/x"),
            Just("../../bus/pci/drivers/mlx5_core"),
            Just("0-3,7"),
            Just("18446744073709551615"),
            Just("Ethernet"),
        ]
        .prop_map(|text| Some(text.to_owned())),
    ]
}

proptest! {
    #[test]
    fn any_machine_is_read_within_bounds(answers in proptest::collection::vec(answer(), 1..40)) {
        let system = Arbitrary { answers, asked: Cell::new(0) };
        let snapshot = Snapshot::read(&system);
        prop_assert!(snapshot.gaps.list.len() <= GAPS_MAX);
        for port in &snapshot.rdma_ports {
            let sample = CounterSample::of_port(&system, port);
            let _ = delta(&sample, &sample);
        }
        let json = serde_json::to_string(&snapshot).unwrap();
        prop_assert_eq!(serde_json::from_str::<Snapshot>(&json).unwrap(), snapshot);
    }
}
