//! The same machines with one thing changed: the change shows as a gap about just that, and the rest stays.

use std::fs;
use std::os::unix::fs::symlink;

use towline_topo::gap::{Gap, Reason};
use towline_topo::place::{Place, Relation};
use towline_topo::rdma::{DeviceKind, GIDS_MAX, PORTS_MAX, RdmaPort};
use towline_topo::snapshot::Snapshot;
use towline_topo::system::{ENTRIES_MAX, FILE_BYTES_MAX, System};

use crate::machine::{EFA_PORT, IB_PORT, Machine, RXE_PORT};

fn gaps(snapshot: &Snapshot) -> Vec<(&str, &Reason)> {
    snapshot.gaps.list.iter().map(|gap: &Gap| (gap.subject.as_str(), &gap.reason)).collect()
}

/// Every file of a machine that holds a fact of its own.
const FACTS: &[&str] = &[
    "/etc/machine-id",
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/kernel/hostname",
    "/proc/self/stat",
    "/proc/self/status",
    "/proc/self/cgroup",
    "/sys/devices/system/node/node1/cpulist",
    "/sys/class/infiniband/mlx5_0/node_guid",
    "/sys/class/infiniband/mlx5_0/fw_ver",
    "/sys/class/infiniband/mlx5_0/device/numa_node",
    "/sys/class/infiniband/mlx5_0/ports/1/state",
    "/sys/class/infiniband/mlx5_0/ports/1/phys_state",
    "/sys/class/infiniband/mlx5_0/ports/1/rate",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer",
    "/sys/class/infiniband/mlx5_0/ports/1/lid",
    "/sys/class/infiniband/mlx5_0/ports/1/sm_lid",
    "/sys/class/infiniband/mlx5_0/ports/1/gids/0",
    "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0",
];

/// Makes one change to each fact in turn, and holds that it is the only gap.
fn each_fact_alone(change: impl Fn(&Machine, &str), reason: impl Fn(&Reason) -> bool) {
    for fact in FACTS {
        let machine = Machine::infiniband();
        change(&machine, fact);
        let snapshot = machine.snapshot();
        let found = gaps(&snapshot);
        assert!(found.len() == 1 && found[0].0 == *fact && reason(found[0].1), "{fact}: {found:?}");
        assert_eq!(snapshot.rdma_ports.len(), 1, "{fact}");
    }
}

#[test]
fn a_huge_file_is_a_gap_and_stays_unread() {
    let huge = vec![b'4'; usize::try_from(FILE_BYTES_MAX).unwrap() + 1];
    each_fact_alone(
        |machine, fact| machine.file(fact, &huge),
        |reason| *reason == Reason::TooLarge { bytes_max: FILE_BYTES_MAX },
    );
}

#[test]
fn garbage_is_a_gap() {
    let long = format!("7\u{1b}{}", "x".repeat(300));
    each_fact_alone(
        |machine, fact| machine.file(fact, &long),
        |reason| matches!(reason, Reason::Unparsable { found, .. } if !found.contains('\u{1b}')),
    );
}

#[test]
fn bytes_that_are_no_text_are_a_gap() {
    each_fact_alone(
        |machine, fact| machine.file(fact, [0xff, 0xfe, 0x00]),
        |reason| *reason == Reason::NotText,
    );
}

#[test]
fn a_missing_file_is_a_gap() {
    // The address whose type is missing is still one; a table of types without any has the gap of the table.
    each_fact_alone(
        |machine, fact| {
            machine.file(&format!("{IB_PORT}/gid_attrs/types/9"), "\n");
            machine.remove(fact);
            if fact.contains("/gids/0") {
                symlink("nowhere", machine.path(fact)).unwrap();
            }
        },
        |reason| *reason == Reason::Absent,
    );
}

#[test]
fn a_folder_in_place_of_a_file_is_a_gap() {
    each_fact_alone(
        |machine, fact| {
            machine.remove(fact);
            fs::create_dir(machine.path(fact)).unwrap();
        },
        |reason| *reason == Reason::NotAFile,
    );
}

#[test]
fn a_loop_of_links_is_a_gap() {
    each_fact_alone(
        |machine, fact| {
            machine.remove(fact);
            let name = fact.rsplit('/').next().unwrap();
            symlink(name, machine.path(fact)).unwrap();
        },
        |reason| matches!(reason, Reason::Failed { .. }),
    );
}

#[test]
fn a_link_out_of_the_tree_is_a_gap() {
    each_fact_alone(
        |machine, fact| {
            machine.remove(fact);
            symlink("/proc/self/status", machine.path(fact)).unwrap();
        },
        |reason| *reason == Reason::Outside,
    );
}

#[test]
fn a_path_upwards_does_not_leave_the_tree() {
    let machine = Machine::plain();
    let up = "/../".repeat(40) + "proc/self/status";
    assert_eq!(machine.recorded().read(&up).unwrap_err().reason, Reason::Outside);
    assert_eq!(machine.recorded().list("/../").unwrap_err().reason, Reason::Outside);
}

#[test]
fn an_empty_file_is_without_a_value() {
    for fact in FACTS.iter().filter(|fact| !fact.ends_with("cpulist")) {
        let machine = Machine::infiniband();
        machine.file(fact, "\n");
        assert_eq!(gaps(&machine.snapshot()), [(*fact, &Reason::Unset)]);
    }
}

#[test]
fn garbled_ids_do_not_leak_into_gaps() {
    for id in ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"] {
        let machine = Machine::plain();
        machine.file(id, "0123456789abcdef0123456789abcde\n");
        let json = serde_json::to_string(&machine.snapshot()).unwrap();
        assert!(json.contains("withheld") && !json.contains("0123456789abcde"), "{json}");
    }
}

#[test]
fn without_a_boot_id_two_places_stay_unrelated() {
    let machine = Machine::plain();
    let (known, _) = Place::read(&machine.recorded());
    machine.remove("/proc/sys/kernel/random/boot_id");
    let (unknown, gaps) = Place::read(&machine.recorded());
    assert_eq!(gaps.list.len(), 1);
    assert_eq!(
        (known.relation(&unknown), unknown.relation(&unknown)),
        (Relation::Unknown, Relation::Unknown)
    );
}

#[test]
fn without_namespaces_a_place_says_so() {
    let machine = Machine::plain();
    machine.remove("/proc/self/ns");
    let (place, gaps) = Place::read(&machine.recorded());
    assert_eq!((place.namespaces.pid, gaps.list.len()), (None, 3));
    machine.link("/proc/self/ns/net", "net:[abc]");
    machine.link("/proc/self/ns/pid", "ipc:[3]");
    machine.file("/proc/self/ns/ipc", "ipc:[4]");
    let (place, gaps) = Place::read(&machine.recorded());
    assert_eq!((place.namespaces.network, place.namespaces.pid, place.namespaces.ipc), (None, None, None));
    assert_eq!(gaps.list.len(), 3);
}

#[test]
fn no_node_with_an_allowed_cpu_is_a_gap() {
    let machine = Machine::plain();
    machine.file("/proc/self/status", "Cpus_allowed_list:\t100-101\n");
    let (place, gaps) = Place::read(&machine.recorded());
    assert_eq!((place.numa_nodes, gaps.list.len()), (None, 1));
}

#[test]
fn a_device_without_a_driver_is_of_unknown_kind() {
    let machine = Machine::infiniband();
    machine.remove("/sys/devices/pci0000:00/0000:4b:00.0/driver");
    let snapshot = machine.snapshot();
    assert_eq!(gaps(&snapshot), [("/sys/class/infiniband/mlx5_0/device/driver", &Reason::Absent)]);
    assert_eq!(snapshot.rdma_ports[0].device.kind(), DeviceKind::Unknown);
}

#[test]
fn a_software_device_without_parent_is_not_called_soft_roce() {
    let machine = Machine::soft_roce();
    machine.remove("/sys/class/infiniband/rxe0/parent");
    let snapshot = machine.snapshot();
    assert_eq!(gaps(&snapshot), [("/sys/class/infiniband/rxe0/parent", &Reason::Absent)]);
    assert_eq!(snapshot.rdma_ports[0].device.kind(), DeviceKind::Unknown);
}

#[test]
fn a_device_that_is_no_pci_function_has_no_pci_address() {
    let machine = Machine::infiniband();
    let device = "/sys/devices/pci0000:00/0000:4b:00.0/infiniband/mlx5_0/device";
    machine.remove(device);
    machine
        .link("/sys/devices/pci0000:00/mlx5_core.sf.4/driver", "../../../bus/auxiliary/drivers/mlx5_core.sf");
    machine.file("/sys/devices/pci0000:00/mlx5_core.sf.4/numa_node", "-1\n");
    machine.link(device, "../../../mlx5_core.sf.4");
    let snapshot = machine.snapshot();
    let found = gaps(&snapshot);
    assert!(
        matches!(found[0], ("/sys/class/infiniband/mlx5_0/device", Reason::Unparsable { .. })),
        "{found:?}"
    );
    assert_eq!(found[1], ("/sys/class/infiniband/mlx5_0/device/numa_node", &Reason::Unset));
    assert_eq!((snapshot.rdma_ports[0].device.pci, found.len()), (None, 2));
}

#[test]
fn a_kernel_without_gid_types_is_one_gap() {
    let machine = Machine::soft_roce();
    machine.remove(&format!("{RXE_PORT}/gid_attrs/types"));
    let snapshot = machine.snapshot();
    assert_eq!(gaps(&snapshot), [(format!("{RXE_PORT}/gid_attrs/types").as_str(), &Reason::Absent)]);
    assert!(snapshot.rdma_ports[0].gids.iter().all(|gid| gid.kind.is_none()));
}

#[test]
fn an_ethernet_address_without_interface_is_a_gap() {
    let machine = Machine::soft_roce();
    machine.remove(&format!("{RXE_PORT}/gid_attrs/ndevs/1"));
    let snapshot = machine.snapshot();
    assert_eq!(gaps(&snapshot), [(format!("{RXE_PORT}/gid_attrs/ndevs/1").as_str(), &Reason::Absent)]);
    assert_eq!(snapshot.rdma_ports[0].gids.len(), 2);
}

#[test]
fn a_long_table_of_addresses_is_cut_and_says_so() {
    let machine = Machine::efa();
    for index in 1..=GIDS_MAX {
        machine.file(&format!("{EFA_PORT}/gids/{index}"), format!("fe80::{index:x}\n"));
        machine.file(&format!("{EFA_PORT}/gid_attrs/types/{index}"), "RoCE v2\n");
    }
    let snapshot = machine.snapshot();
    assert_eq!(snapshot.rdma_ports[0].gids.len(), GIDS_MAX);
    let table = format!("{EFA_PORT}/gids");
    assert_eq!(gaps(&snapshot), [(table.as_str(), &Reason::TooMany { entries_max: GIDS_MAX as u64 })]);
}

#[test]
fn an_endless_folder_is_a_gap() {
    let machine = Machine::infiniband();
    for index in 0..ENTRIES_MAX {
        machine.file(&format!("{IB_PORT}/gids/{}", index + 2), "");
    }
    let snapshot = machine.snapshot();
    let table = format!("{IB_PORT}/gids");
    assert_eq!(gaps(&snapshot), [(table.as_str(), &Reason::TooMany { entries_max: ENTRIES_MAX as u64 })]);
    assert!(snapshot.rdma_ports[0].gids.is_empty());
}

#[test]
fn a_port_that_is_no_number_is_a_gap_and_more_ports_than_any_machine_has_are_one() {
    let machine = Machine::infiniband();
    machine.file("/sys/class/infiniband/mlx5_0/ports/one/state", "4: ACTIVE\n");
    assert!(matches!(gaps(&machine.snapshot())[..], [(_, Reason::Unparsable { .. })]));
    for number in 2..=PORTS_MAX + 1 {
        fs::create_dir(machine.path(&format!("/sys/class/infiniband/mlx5_0/ports/{number}"))).unwrap();
    }
    let (ports, gaps) = RdmaPort::read_all(&machine.recorded());
    assert_eq!(ports.len(), PORTS_MAX);
    assert!(gaps.left_out > 0, "each of the empty ports has gaps, and only so many are kept");
}

#[test]
fn a_machine_that_tells_nothing_is_all_gaps() {
    let machine = Machine::plain();
    for folder in ["/etc", "/proc", "/sys"] {
        machine.remove(folder);
    }
    let snapshot = machine.snapshot();
    assert_eq!(snapshot.place, Place::default());
    assert!(snapshot.rdma_ports.is_empty());
    assert_eq!(snapshot.gaps.list.iter().filter(|gap| gap.reason == Reason::Absent).count(), 10);
}
