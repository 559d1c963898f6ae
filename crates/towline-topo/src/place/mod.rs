//! Where a process runs, so that two agents can tell what they share.
//!
//! A place rides on agent cards: its texts are bounded by their types, and what identifies the machine is hashed. It is
//! a claim of the one who sends it. Whether memory can really be shared is decided by a probe; a place tells whether
//! probing is worth it.

mod host_key;
mod relation;

use serde::{Deserialize, Serialize};

pub use self::host_key::HostKey;
pub use self::relation::{Answer, Namespace, Relation};
use crate::gap::{Gap, Gaps, Reason};
use crate::id_set::IdSet;
use crate::label::Label;
use crate::reader::Reader;
use crate::system::System;

/// Most bytes of a place as JSON: two sets of 256 ranges, two labels of 255 bytes with every byte escaped, and the rest.
pub const PLACE_JSON_BYTES_MAX: usize = 8 * 1024;

/// Where a process runs. A field without a value is not known; so is one that a peer of another version does not send.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// The running kernel: the hash of its boot id. It changes with every boot, and decides whether two places are on
    /// one host.
    pub boot: Option<HostKey>,
    /// The installed system: the hash of its machine id. It outlives a reboot, so it can name a host over time; it
    /// decides nothing, because images are cloned with theirs and containers bring their own.
    pub machine: Option<HostKey>,
    /// The host's name, for people only: names repeat, and change.
    pub host_name: Option<Label>,
    /// Which process.
    pub process: Option<Process>,
    /// The namespaces it runs in.
    pub namespaces: Namespaces,
    /// The CPUs its first thread may use.
    pub cpus: Option<IdSet>,
    /// The NUMA nodes on which those CPUs are.
    pub numa_nodes: Option<IdSet>,
    /// Its control group, a hint at container and pod. Inside a container it often reads `/`.
    pub cgroup: Option<Label>,
}

/// A process, as its own namespace numbers it. Numbers are used again; with the start they are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number in its own PID namespace.
    pub pid: u32,
    /// When it started, in clock ticks after boot (`starttime` of proc(5)).
    pub start_ticks: u64,
}

/// The inode numbers of a process's namespaces. They compare on one host only: each kernel numbers its first
/// namespaces alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Namespaces {
    /// Interfaces, ports and abstract sockets.
    pub network: Option<u64>,
    /// Process numbers.
    pub pid: Option<u64>,
    /// System V shared memory and POSIX queues.
    pub ipc: Option<u64>,
}

impl Place {
    /// Reads where this process runs, or, of a recorded machine, where the process ran that recorded it.
    pub fn read(system: &dyn System) -> (Self, Gaps) {
        let mut reader = Reader::new(system);
        let place = Self::read_with(&mut reader);
        (place, reader.gaps)
    }

    pub(crate) fn read_with(reader: &mut Reader<'_>) -> Self {
        let boot = reader.secret("/proc/sys/kernel/random/boot_id", "a UUID", HostKey::of_boot_id);
        let machine = reader.secret("/etc/machine-id", "32 hexadecimal digits", HostKey::of_machine_id);
        let cpus = reader.field("/proc/self/status", "a line Cpus_allowed_list", allowed_cpus);
        let numa_nodes = cpus.as_ref().and_then(|cpus| numa_nodes(reader, cpus));
        Self {
            boot,
            machine,
            host_name: reader.label("/proc/sys/kernel/hostname"),
            process: reader.field("/proc/self/stat", "a line as of proc(5)", process),
            namespaces: Namespaces {
                network: namespace(reader, "net"),
                pid: namespace(reader, "pid"),
                ipc: namespace(reader, "ipc"),
            },
            cpus,
            numa_nodes,
            cgroup: reader.field("/proc/self/cgroup", "a control group of 255 bytes at most", cgroup),
        }
    }
}

fn namespace(reader: &mut Reader<'_>, name: &str) -> Option<u64> {
    let inode = |target: &str| target.strip_prefix(name)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok();
    reader.link(&format!("/proc/self/ns/{name}"), "name:[inode]", inode)
}

/// Number and start out of `/proc/self/stat`. The second field, the command, may hold blanks and brackets; the state
/// after the last bracket is the third, and `starttime` the twenty-second (proc(5)).
fn process(stat: &str) -> Option<Process> {
    let (before, after) = stat.rsplit_once(')')?;
    let pid = before.split_once(' ')?.0.parse().ok()?;
    let start_ticks = after.split_ascii_whitespace().nth(22 - 3)?.parse().ok()?;
    Some(Process { pid, start_ticks })
}

fn allowed_cpus(status: &str) -> Option<IdSet> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    IdSet::parse(list).ok()
}

/// The nodes that have some of these CPUs. One unreadable node leaves the whole unknown.
fn numa_nodes(reader: &mut Reader<'_>, cpus: &IdSet) -> Option<IdSet> {
    let near = near_nodes(reader.system, cpus);
    reader.gaps.keep(near)
}

fn near_nodes(system: &dyn System, cpus: &IdSet) -> Result<IdSet, Gap> {
    const NODES: &str = "/sys/devices/system/node";
    let mut near = Vec::new();
    for name in system.list(NODES)? {
        let Some(id) = name.strip_prefix("node").and_then(|id| id.parse::<u16>().ok()) else { continue };
        let path = format!("{NODES}/{name}/cpulist");
        let text = system.read(&path)?;
        // Memory without CPUs of its own is a node too, with an empty list.
        let here = IdSet::parse(&text).map_err(|_| Gap::unparsable(&path, "a list of CPUs", &text))?;
        near.extend(here.intersects(cpus).then_some(id));
    }
    if near.is_empty() {
        return Err(Gap::new(NODES, Reason::Unset));
    }
    let too_many = |_| Gap::new(NODES, Reason::TooMany { entries_max: IdSet::RANGES_MAX as u64 });
    IdSet::from_ids(near).map_err(too_many)
}

/// The path of version 2 (`0::/path`), or of version 1's memory controller where only that has one.
fn cgroup(text: &str) -> Option<Label> {
    let path = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let counts = controllers.is_empty() || controllers.split(',').any(|name| name == "memory");
        counts.then(|| path.to_owned())
    };
    let longest = text.lines().filter_map(path).max_by_key(String::len)?;
    Label::new(longest).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_command_with_brackets_and_blanks_does_not_shift_the_start() {
        let stat = "1958 (a ) R 1 (b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 460039 3133440";
        assert_eq!(process(stat), Some(Process { pid: 1958, start_ticks: 460_039 }));
        assert_eq!(process("1958 (cat) R 1"), None);
    }

    #[test]
    fn the_control_group_is_the_unified_one_or_that_of_memory() {
        let label = |text| cgroup(text).map(String::from);
        assert_eq!(label("0::/user.slice\n").as_deref(), Some("/user.slice"));
        assert_eq!(label("9:name=systemd:/x/y/z\n4:cpu,memory:/pod/1\n0::/").as_deref(), Some("/pod/1"));
        assert_eq!(label("11:hugetlb:/deep/path"), None);
    }

    #[test]
    fn the_allowed_cpus_stand_in_a_line_of_the_status() {
        let status = "Name:\tcat\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n";
        assert_eq!(allowed_cpus(status).unwrap().to_string(), "0-1");
        assert_eq!(allowed_cpus("Name:\tcat\n"), None);
    }

    #[test]
    fn the_largest_place_keeps_to_its_bound() {
        let label = Label::new("\\".repeat(Label::LEN_MAX)).unwrap();
        let set = IdSet::from_ids((65_024..=65_534).step_by(2)).unwrap();
        let namespaces = Namespaces { network: Some(u64::MAX), pid: Some(u64::MAX), ipc: Some(u64::MAX) };
        let place = Place {
            boot: HostKey::of_boot_id(&"a".repeat(32)),
            machine: HostKey::of_machine_id(&"a".repeat(32)),
            host_name: Some(label.clone()),
            process: Some(Process { pid: u32::MAX, start_ticks: u64::MAX }),
            namespaces,
            cpus: Some(set.clone()),
            numa_nodes: Some(set),
            cgroup: Some(label),
        };
        let json = serde_json::to_string(&place).unwrap();
        assert!(json.len() <= PLACE_JSON_BYTES_MAX, "{} bytes", json.len());
        assert_eq!(serde_json::from_str::<Place>(&json).unwrap(), place);
    }

    #[test]
    fn a_place_of_another_version_is_read_for_what_it_tells() {
        let place: Place =
            serde_json::from_str(r#"{"host_name":"node-7","namespaces":{"net":1},"rack":4}"#).unwrap();
        assert_eq!(place, Place { host_name: Label::new("node-7").ok(), ..Place::default() });
        assert!(serde_json::from_str::<Place>(r#"{"host_name":"a\u0000"}"#).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let text = String::from_utf8_lossy(&bytes);
            let _ = (process(&text), allowed_cpus(&text), cgroup(&text));
        }
    }
}
