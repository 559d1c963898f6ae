//! Small machines, written into a folder the way a recorder leaves them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use tempfile::TempDir;
use towline_topo::snapshot::Snapshot;
use towline_topo::system::Recorded;

/// Where the InfiniBand port of [`Machine::infiniband`] is.
pub(crate) const IB_PORT: &str = "/sys/class/infiniband/mlx5_0/ports/1";
/// Where the EFA port of [`Machine::efa`] is.
pub(crate) const EFA_PORT: &str = "/sys/class/infiniband/rdmap0s6/ports/1";
/// Where the port of [`Machine::soft_roce`] is.
pub(crate) const RXE_PORT: &str = "/sys/class/infiniband/rxe0/ports/1";

/// A recorded machine in a folder of its own.
pub(crate) struct Machine {
    root: TempDir,
}

impl Machine {
    /// A machine that has a place and no RDMA.
    pub(crate) fn plain() -> Self {
        let machine = Self { root: TempDir::new().unwrap() };
        machine.file("/etc/machine-id", "0123456789abcdef0123456789abcdef\n");
        machine.file("/proc/sys/kernel/random/boot_id", "84d5f96e-95d7-4b2c-921c-0c3682db3f93\n");
        machine.file("/proc/sys/kernel/hostname", "node-7\n");
        machine.file(
            "/proc/self/stat",
            "42 (towline) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4600 0 0\n",
        );
        machine.file("/proc/self/status", "Name:\ttowline\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n");
        machine.file("/proc/self/cgroup", "0::/kubepods.slice/pod7\n");
        for (name, inode) in [("net", 4_026_531_833_u64), ("pid", 4_026_531_836), ("ipc", 4_026_531_839)] {
            machine.link(&format!("/proc/self/ns/{name}"), &format!("{name}:[{inode}]"));
        }
        machine.file("/sys/devices/system/node/online", "0-2\n");
        machine.file("/sys/devices/system/node/node0/cpulist", "0-3\n");
        machine.file("/sys/devices/system/node/node1/cpulist", "4-15\n");
        machine.file("/sys/devices/system/node/node2/cpulist", "\n");
        machine.file("/sys/class/net/eth0/statistics/tx_bytes", "5000\n");
        machine.file("/sys/class/net/eth0/statistics/rx_bytes", "7000\n");
        machine
    }

    /// With a ConnectX port on InfiniBand.
    pub(crate) fn infiniband() -> Self {
        let machine = Self::plain();
        machine.pci_device("mlx5_0", "0000:4b:00.0", "mlx5_core");
        machine.file("/sys/class/infiniband/mlx5_0/fw_ver", "28.39.1002\n");
        machine.port(IB_PORT, "InfiniBand", "200 Gb/sec (4X HDR)");
        machine.file(&format!("{IB_PORT}/lid"), "0x12a\n");
        machine.file(&format!("{IB_PORT}/sm_lid"), "0x1\n");
        machine.gid(IB_PORT, (0, "fe80:0000:0000:0000:b83f:d203:00a1:b2c4", "IB/RoCE v1"), None);
        machine.file(&format!("{IB_PORT}/gids/1"), "fe80:0000:0000:0000:0000:0000:0000:0000\n");
        machine.file(&format!("{IB_PORT}/counters/port_xmit_data"), "1000\n");
        machine.file(&format!("{IB_PORT}/counters/port_rcv_data"), "2000\n");
        machine
    }

    /// With an EFA port of a driver that knows reads and writes.
    pub(crate) fn efa() -> Self {
        let machine = Self::plain();
        machine.pci_device("rdmap0s6", "0000:00:06.0", "efa");
        machine.file("/sys/class/infiniband/rdmap0s6/fw_ver", "0.0.0.0\n");
        machine.port(EFA_PORT, "Unknown", "100 Gb/sec (4X EDR)");
        machine.gid(EFA_PORT, (0, "fe80:0000:0000:0000:04c6:d3ff:fe2a:9a1d", "IB/RoCE v1"), None);
        let counts = [
            ("tx_bytes", 10_000),
            ("rx_bytes", 20_000),
            ("rdma_read_bytes", 300),
            ("rdma_write_bytes", 400),
            ("rdma_write_recv_bytes", 500),
        ];
        for (name, count) in counts {
            machine.file(&format!("{EFA_PORT}/hw_counters/{name}"), format!("{count}\n"));
        }
        machine
    }

    /// With soft-RoCE over a virtual interface.
    pub(crate) fn soft_roce() -> Self {
        let machine = Self::plain();
        machine.link("/sys/class/infiniband/rxe0", "../../devices/virtual/infiniband/rxe0");
        machine.file("/sys/devices/virtual/infiniband/rxe0/parent", "veth0\n");
        machine.file("/sys/devices/virtual/infiniband/rxe0/node_guid", "e05d:75ff:fe89:f97e\n");
        machine.file("/sys/devices/virtual/infiniband/rxe0/fw_ver", "\n");
        machine.port(RXE_PORT, "Ethernet", "10 Gb/sec (1X FDR10)");
        machine.gid(RXE_PORT, (0, "fe80:0000:0000:0000:e05d:75ff:fe89:f97e", "RoCE v2"), Some("veth0"));
        machine.gid(RXE_PORT, (1, "0000:0000:0000:0000:0000:ffff:c000:0201", "RoCE v2"), Some("veth0"));
        machine.gid(RXE_PORT, (2, "0000:0000:0000:0000:0000:0000:0000:0000", ""), Some(""));
        machine.file(&format!("{RXE_PORT}/hw_counters/sent_pkts"), "12\n");
        machine
    }

    fn pci_device(&self, name: &str, address: &str, driver: &str) {
        let at = format!("/sys/devices/pci0000:00/{address}");
        self.link(
            &format!("/sys/class/infiniband/{name}"),
            &format!("../../devices/pci0000:00/{address}/infiniband/{name}"),
        );
        self.file(&format!("{at}/numa_node"), "1\n");
        self.link(&format!("{at}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
        self.file(&format!("{at}/infiniband/{name}/node_guid"), "b83f:d203:00a1:b2c4\n");
        self.link(&format!("{at}/infiniband/{name}/device"), &format!("../../../{address}"));
    }

    fn port(&self, at: &str, link_layer: &str, rate: &str) {
        let lines = [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", rate),
            ("link_layer", link_layer),
            ("lid", "0x0"),
            ("sm_lid", "0x0"),
        ];
        for (name, line) in lines {
            self.file(&format!("{at}/{name}"), format!("{line}\n"));
        }
    }

    /// An address as (index, address, type).
    fn gid(&self, at: &str, (index, address, kind): (u32, &str, &str), netdev: Option<&str>) {
        self.file(&format!("{at}/gids/{index}"), format!("{address}\n"));
        self.file(&format!("{at}/gid_attrs/types/{index}"), format!("{kind}\n"));
        if let Some(netdev) = netdev {
            self.file(&format!("{at}/gid_attrs/ndevs/{index}"), format!("{netdev}\n"));
        }
    }

    /// Where a path of the machine lies here; links on the way are followed.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path.trim_start_matches('/'))
    }

    /// Writes a file over whatever is there.
    pub(crate) fn file(&self, path: &str, bytes: impl AsRef<[u8]>) {
        let file = self.path(path);
        self.parent(&file);
        fs::write(file, bytes).unwrap();
    }

    /// Puts a link where nothing is.
    pub(crate) fn link(&self, path: &str, target: &str) {
        let link = self.path(path);
        self.parent(&link);
        symlink(target, link).unwrap();
    }

    fn parent(&self, file: &std::path::Path) {
        let folder = file.parent().unwrap();
        // A link may lead to a folder that is still to be made.
        let missing = folder.ancestors().find(|part| part.is_symlink() && !part.exists());
        if let Some(link) = missing {
            fs::create_dir_all(link.parent().unwrap().join(fs::read_link(link).unwrap())).unwrap();
        }
        fs::create_dir_all(folder).unwrap();
    }

    /// Takes a file, a link or a folder away.
    pub(crate) fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    /// The machine as a system.
    pub(crate) fn recorded(&self) -> Recorded {
        Recorded::open(self.root.path()).unwrap()
    }

    /// All that is read of it.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::read(&self.recorded())
    }
}
