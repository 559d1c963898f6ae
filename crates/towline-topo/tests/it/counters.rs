//! Counters of whole machines, before and after bytes moved.

use towline_topo::counters::{CounterSample, Direction, Doubt, Moved, Scope, delta, total};
use towline_topo::gap::{Gaps, Reason};
use towline_topo::rdma::RdmaPort;

use crate::machine::{EFA_PORT, IB_PORT, Machine};

fn sample(machine: &Machine) -> CounterSample {
    let (ports, _) = RdmaPort::read_all(&machine.recorded());
    CounterSample::of_port(&machine.recorded(), &ports[0])
}

#[test]
fn an_infiniband_port_counts_words() {
    let machine = Machine::infiniband();
    let before = sample(&machine);
    assert_eq!((before.subject.as_str(), &before.gaps), ("mlx5_0/1", &Gaps::default()));
    machine.file(&format!("{IB_PORT}/counters/port_rcv_data"), "262144\n");
    let changes = delta(&before, &sample(&machine));
    assert_eq!(total(&changes, Direction::Received), Moved::Bytes(4 * (262_144 - 2000)));
    assert_eq!(total(&changes, Direction::Sent), Moved::Bytes(0));
    assert!(changes[0].file.ends_with("/counters/port_xmit_data"));
}

#[test]
fn an_efa_port_counts_bytes_and_tells_reads_apart() {
    let machine = Machine::efa();
    let before = sample(&machine);
    machine.file(&format!("{EFA_PORT}/hw_counters/rx_bytes"), "1070000\n");
    machine.file(&format!("{EFA_PORT}/hw_counters/rdma_read_bytes"), "1000300\n");
    let changes = delta(&before, &sample(&machine));
    assert_eq!(total(&changes, Direction::Received), Moved::Bytes(1_050_000));
    let reads: Vec<_> = changes.iter().filter(|change| change.scope == Scope::RdmaRead).collect();
    assert_eq!((reads.len(), reads[0].moved), (1, Moved::Bytes(1_000_000)));
}

#[test]
fn an_efa_driver_without_write_counters_still_counts_its_totals() {
    let machine = Machine::efa();
    machine.remove(&format!("{EFA_PORT}/hw_counters/rdma_write_bytes"));
    machine.remove(&format!("{EFA_PORT}/hw_counters/rdma_write_recv_bytes"));
    let sample = sample(&machine);
    assert_eq!((sample.readings.len(), sample.gaps.list.len()), (3, 2));
    assert_eq!(total(&delta(&sample, &sample), Direction::Sent), Moved::Bytes(0));
}

#[test]
fn soft_roce_has_no_byte_counter() {
    let sample = sample(&Machine::soft_roce());
    assert!(sample.readings.is_empty());
    assert!(
        matches!(&sample.gaps.list[0].reason, Reason::NotOffered { detail } if detail.contains("rdma_rxe"))
    );
    assert_eq!(total(&delta(&sample, &sample), Direction::Sent), Moved::Unknown(Doubt::NotSampled));
}

#[test]
fn a_driver_that_nobody_checked_has_no_counter_even_with_familiar_files() {
    let machine = Machine::infiniband();
    let driver = "/sys/devices/pci0000:00/0000:4b:00.0/driver";
    for target in ["../../../bus/pci/drivers/fancy_nic", "../../../bus/pci/drivers/.."] {
        machine.remove(driver);
        machine.link(driver, target);
        let sample = sample(&machine);
        assert!(sample.readings.is_empty());
        assert!(matches!(sample.gaps.list[0].reason, Reason::NotOffered { .. }), "{:?}", sample.gaps);
    }
}

#[test]
fn a_port_without_performance_agent_has_gaps_for_counts() {
    let machine = Machine::infiniband();
    machine.file(&format!("{IB_PORT}/counters/port_xmit_data"), "N/A (no PMA)\n");
    let sample = sample(&machine);
    assert_eq!((sample.readings.len(), sample.gaps.list.len()), (1, 1));
    assert!(matches!(sample.gaps.list[0].reason, Reason::Unparsable { .. }));
}

#[test]
fn a_reset_counter_does_not_prove_a_transfer() {
    let machine = Machine::efa();
    let before = sample(&machine);
    machine.file(&format!("{EFA_PORT}/hw_counters/tx_bytes"), "12\n");
    let changes = delta(&before, &sample(&machine));
    assert_eq!(total(&changes, Direction::Sent), Moved::Unknown(Doubt::Backwards));
}

#[test]
fn an_interface_counts_bytes() {
    let machine = Machine::plain();
    let before = CounterSample::of_netdev(&machine.recorded(), "eth0");
    machine.file("/sys/class/net/eth0/statistics/tx_bytes", "9000\n");
    let changes = delta(&before, &CounterSample::of_netdev(&machine.recorded(), "eth0"));
    assert_eq!(total(&changes, Direction::Sent), Moved::Bytes(4000));
    let absent = CounterSample::of_netdev(&machine.recorded(), "eth9");
    assert_eq!((absent.readings.len(), absent.gaps.list.len()), (0, 2));
}

#[test]
fn the_name_of_an_interface_leads_nowhere_else() {
    let machine = Machine::plain();
    for name in ["../net/eth0", "..", "", "eth0/../eth0"] {
        let sample = CounterSample::of_netdev(&machine.recorded(), name);
        assert!(sample.readings.is_empty() && sample.gaps.list.len() == 1, "{name}");
    }
}

#[test]
fn samples_survive_json() {
    let sample = sample(&Machine::efa());
    let json = serde_json::to_string(&sample).unwrap();
    assert_eq!(serde_json::from_str::<CounterSample>(&json).unwrap(), sample);
}
