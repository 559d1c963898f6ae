//! Whole machines, unchanged: every field has its value, and there is no gap.

use towline_topo::gap::Gaps;
use towline_topo::place::{Place, Relation};
use towline_topo::rdma::{DeviceKind, GidKind, LinkLayer, PhysState, PortState, RdmaPort};
use towline_topo::snapshot::{SNAPSHOT_SCHEMA, Snapshot};

use crate::machine::Machine;

fn port_of(machine: &Machine) -> RdmaPort {
    let (mut ports, gaps) = RdmaPort::read_all(&machine.recorded());
    assert_eq!((ports.len(), gaps), (1, Gaps::default()));
    ports.remove(0)
}

#[test]
fn a_place_is_read_whole() {
    let (place, gaps) = Place::read(&Machine::plain().recorded());
    assert_eq!(gaps, Gaps::default());
    assert_eq!(place.host_name.as_ref().unwrap().as_str(), "node-7");
    assert_eq!(place.process.map(|process| (process.pid, process.start_ticks)), Some((42, 4600)));
    assert_eq!(place.namespaces.network, Some(4_026_531_833));
    assert_eq!(place.cpus.as_ref().unwrap().count(), 8);
    assert_eq!(place.numa_nodes.as_ref().unwrap().to_string(), "0-1");
    assert_eq!(place.cgroup.as_ref().unwrap().as_str(), "/kubepods.slice/pod7");
}

#[test]
fn a_place_carries_neither_id() {
    let (place, _) = Place::read(&Machine::plain().recorded());
    let json = serde_json::to_string(&place).unwrap();
    assert!(!json.contains("0123456789abcdef") && !json.contains("84d5f96e"), "{json}");
}

#[test]
fn a_rebooted_machine_is_another_host_under_the_same_name() {
    let machine = Machine::plain();
    let (before, _) = Place::read(&machine.recorded());
    machine.file("/proc/sys/kernel/random/boot_id", "00000000-95d7-4b2c-921c-0c3682db3f93\n");
    let (after, _) = Place::read(&machine.recorded());
    assert_eq!(before.machine, after.machine);
    assert_eq!(before.relation(&after), Relation::OtherHost);
}

#[test]
fn an_infiniband_port_is_read_whole() {
    let port = port_of(&Machine::infiniband());
    assert_eq!(port.name(), "mlx5_0/1");
    assert_eq!((port.state, port.phys_state), (Some(PortState::Active), Some(PhysState::LinkUp)));
    assert_eq!(port.link_layer, Some(LinkLayer::InfiniBand));
    let rate = port.rate.unwrap();
    assert_eq!((rate.link_gbps, rate.lanes, rate.speed.unwrap().as_str()), (200.0, 4, "HDR"));
    assert_eq!((port.lid, port.sm_lid), (Some(0x12a), Some(1)));
    assert_eq!(port.gids.len(), 1, "the place without an interface is not in use");
    assert_eq!((port.gids[0].index, port.gids[0].kind), (0, Some(GidKind::IbOrRoceV1)));
    let device = port.device;
    assert_eq!((device.kind(), device.driver.unwrap().as_str()), (DeviceKind::Other, "mlx5_core"));
    assert_eq!((device.pci.unwrap().to_string().as_str(), device.numa_node), ("0000:4b:00.0", Some(1)));
    assert_eq!(device.firmware.unwrap().as_str(), "28.39.1002");
}

#[test]
fn an_efa_port_is_known_by_its_driver() {
    let port = port_of(&Machine::efa());
    assert_eq!(port.device.kind(), DeviceKind::Efa);
    assert_eq!(port.link_layer, Some(LinkLayer::Unspecified));
}

#[test]
fn soft_roce_is_never_taken_for_hardware() {
    let port = port_of(&Machine::soft_roce());
    assert_eq!(port.device.kind(), DeviceKind::SoftRoce);
    assert_eq!((port.device.pci, port.device.numa_node), (None, None));
    assert_eq!(port.gids.len(), 2);
    assert_eq!(port.gids[1].address.to_string(), "::ffff:192.0.2.1");
    assert_eq!(port.gids[1].netdev.as_ref().unwrap().as_str(), "veth0");
}

#[test]
fn a_machine_without_rdma_has_no_ports_and_no_gaps() {
    let snapshot = Machine::plain().snapshot();
    assert!(snapshot.rdma_ports.is_empty());
    assert_eq!(snapshot.gaps, Gaps::default());
}

#[test]
fn a_snapshot_survives_json() {
    for machine in [Machine::infiniband(), Machine::efa(), Machine::soft_roce()] {
        machine.remove("/etc/machine-id");
        let snapshot = machine.snapshot();
        let json = serde_json::to_string_pretty(&snapshot).unwrap();
        let read: Snapshot = serde_json::from_str(&json).unwrap();
        assert_eq!((read.schema, &read), (SNAPSHOT_SCHEMA, &snapshot));
    }
}
