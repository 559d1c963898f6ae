//! Machines that nobody here made, where the checkout stands beside them: recorded Linux trees of hwloc's tests, and
//! the text of a soft-RoCE machine's `/sys`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use towline_topo::counters::{CounterSample, Direction, Doubt, Moved, delta, total};
use towline_topo::rdma::{DeviceKind, LinkLayer, PhysState, PortState, RdmaPort};
use towline_topo::snapshot::Snapshot;
use towline_topo::system::Recorded;

fn shared(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(path)
}

/// What is left packed: thousands of small files that nothing here reads.
const LEFT: &[&str] = &[
    "*/system/cpu",
    "*/node[0-9]*/memory[0-9]*",
    "*/node[0-9]*/cpu[0-9]*",
    "*/host[0-9]*",
    "*/usb[0-9]*",
    "*/resource*",
    "*/statistics",
    "*/power",
    "*/dev",
    "*/bus",
];

/// Unpacks an archive, and gives the folder in it that is the machine's root.
fn unpacked(archive: &Path, into: &Path) -> Result<Recorded, String> {
    let mut tar = Command::new("tar");
    tar.args(LEFT.iter().map(|pattern| format!("--exclude={pattern}")));
    let ended = tar.arg("-xjf").arg(archive).arg("-C").arg(into).status();
    if !ended.map_err(|error| error.to_string())?.success() {
        return Err("tar could not unpack it".to_owned());
    }
    let root = fs::read_dir(into).unwrap().next().ok_or("nothing in the archive")?.unwrap().path();
    Recorded::open(root).map_err(|error| error.to_string())
}

#[test]
fn recorded_machines_are_read_and_their_ports_known() {
    const CHECK: &str = "recorded machines";
    let Ok(archives) = fs::read_dir(shared("topologies/sysfs")) else {
        return crate::skips::note(CHECK, "there are none beside this checkout");
    };
    let (mut machines, mut ports) = (0, 0);
    for archive in archives.map(|entry| entry.unwrap().path()) {
        let folder = TempDir::new().unwrap();
        let system = match unpacked(&archive, folder.path()) {
            Ok(system) => system,
            Err(why) => return crate::skips::note(CHECK, &why),
        };
        let snapshot = Snapshot::read(&system);
        for port in &snapshot.rdma_ports {
            check_recorded_port(&system, port);
        }
        machines += 1;
        ports += snapshot.rdma_ports.len();
        let json = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&json).unwrap(), snapshot, "{}", archive.display());
    }
    assert!(machines > 0 && ports > 0, "{machines} machines, {ports} ports");
}

/// What holds for the ports of these machines: up, on InfiniBand, of a known driver.
fn check_recorded_port(system: &Recorded, port: &RdmaPort) {
    assert_eq!((port.state, port.phys_state), (Some(PortState::Active), Some(PhysState::LinkUp)), "{port:?}");
    assert_eq!(port.link_layer, Some(LinkLayer::InfiniBand));
    assert!(port.rate.as_ref().is_some_and(|rate| rate.link_gbps > 0.0), "{port:?}");
    assert_eq!((port.device.kind(), port.gids.len()), (DeviceKind::Other, 1));
    assert!(port.device.pci.is_some() && port.device.numa_node.is_some());
    // The 32-bit counters of these ports have stopped at all ones: nothing can be proven by them.
    let sample = CounterSample::of_port(system, port);
    let moved = total(&delta(&sample, &sample), Direction::Sent);
    assert_eq!((sample.readings.len(), moved), (2, Moved::Unknown(Doubt::Saturated)));
}

/// Writes the lines `/sys/path: text` as files. Gaps in the text are files that could not be read.
fn written(text: &str, root: &Path) {
    for line in text.lines().filter(|line| line.starts_with("/sys/class/infiniband/")) {
        let Some((path, content)) = line.split_once(": ") else { continue };
        let path = path.replacen("/sys/class", "/sys/devices/virtual", 1);
        let file = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content.replace('|', "\n")).unwrap();
    }
    let class = root.join("sys/class/infiniband");
    fs::create_dir_all(&class).unwrap();
    for device in ["rxe0", "rxe1"] {
        let target = format!("../../devices/virtual/infiniband/{device}");
        std::os::unix::fs::symlink(target, class.join(device)).unwrap();
    }
}

#[test]
fn recorded_soft_roce_is_known_for_what_it_is() {
    let Ok(text) = fs::read_to_string(shared("rdma-lab/sysfs-rxe.txt")) else {
        return crate::skips::note("recorded soft-RoCE", "there is none beside this checkout");
    };
    let root = TempDir::new().unwrap();
    written(&text, root.path());
    let (ports, gaps) = RdmaPort::read_all(&Recorded::open(root.path()).unwrap());
    assert!(gaps.is_empty(), "{gaps:?}");
    assert_eq!(ports.iter().map(RdmaPort::name).collect::<Vec<_>>(), ["rxe0/1", "rxe1/1"]);
    for port in &ports {
        assert_eq!((port.device.kind(), port.state), (DeviceKind::SoftRoce, Some(PortState::Active)));
        assert_eq!((port.link_layer, port.gids.len()), (Some(LinkLayer::Ethernet), 2));
        assert!(port.gids.iter().all(|gid| gid.netdev.is_some() && gid.kind.is_some()));
    }
}
