//! What two places share. Only what both know decides; a host's name and its machine id never do.

use serde::{Deserialize, Serialize};

use super::Place;

/// How near two places are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Relation {
    /// One process: one host, one PID namespace, one number, one start.
    SameProcess,
    /// One running kernel, by its boot id. Virtual machines restored from one snapshot share theirs as well, so a
    /// probe has the last word before memory is shared.
    SameHost,
    /// Two kernels, or two sandboxes that bring a boot id each; either way, two that can't share memory.
    OtherHost,
    /// One of the boot ids is not known.
    Unknown,
}

/// A namespace that two processes of a host may or may not share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// Interfaces, ports and abstract sockets.
    Network,
    /// Process numbers: whether one can name the other by its own.
    Pid,
    /// System V shared memory and POSIX queues.
    Ipc,
}

/// Yes, no, or not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Both say so.
    Yes,
    /// Both say otherwise.
    No,
    /// One of them does not say.
    Unknown,
}

impl Place {
    /// How near `other` is. The same either way round.
    pub fn relation(&self, other: &Self) -> Relation {
        match (self.boot, other.boot) {
            (Some(mine), Some(theirs)) if mine != theirs => Relation::OtherHost,
            (Some(_), Some(_)) if self.is_process_of(other) => Relation::SameProcess,
            (Some(_), Some(_)) => Relation::SameHost,
            _ => Relation::Unknown,
        }
    }

    /// Whether both processes are in one namespace.
    pub fn shares(&self, other: &Self, namespace: Namespace) -> Answer {
        match self.relation(other) {
            Relation::SameProcess => return Answer::Yes,
            Relation::OtherHost => return Answer::No,
            Relation::Unknown => return Answer::Unknown,
            Relation::SameHost => {}
        }
        match (self.inode(namespace), other.inode(namespace)) {
            (Some(mine), Some(theirs)) if mine == theirs => Answer::Yes,
            (Some(_), Some(_)) => Answer::No,
            _ => Answer::Unknown,
        }
    }

    fn is_process_of(&self, other: &Self) -> bool {
        let known = self.process.is_some() && self.namespaces.pid.is_some();
        known && self.process == other.process && self.namespaces.pid == other.namespaces.pid
    }

    fn inode(&self, namespace: Namespace) -> Option<u64> {
        match namespace {
            Namespace::Network => self.namespaces.network,
            Namespace::Pid => self.namespaces.pid,
            Namespace::Ipc => self.namespaces.ipc,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HostKey, Namespaces, Process};
    use super::*;

    fn place() -> Place {
        Place {
            boot: HostKey::of_boot_id(&"a".repeat(32)),
            machine: HostKey::of_machine_id(&"b".repeat(32)),
            process: Some(Process { pid: 7, start_ticks: 100 }),
            namespaces: Namespaces { network: Some(1), pid: Some(2), ipc: Some(3) },
            ..Place::default()
        }
    }

    fn both_ways(a: &Place, b: &Place) -> Relation {
        assert_eq!(a.relation(b), b.relation(a));
        a.relation(b)
    }

    #[test]
    fn equal_boot_ids_are_one_host_and_different_ones_are_not() {
        let mut other = place();
        other.process = Some(Process { pid: 8, start_ticks: 100 });
        assert_eq!(both_ways(&place(), &other), Relation::SameHost);
        other.boot = HostKey::of_boot_id(&"c".repeat(32));
        assert_eq!(both_ways(&place(), &other), Relation::OtherHost);
    }

    #[test]
    fn an_unknown_boot_id_leaves_the_relation_unknown() {
        let stranger = Place { boot: None, ..place() };
        assert_eq!(both_ways(&place(), &stranger), Relation::Unknown);
        assert_eq!(both_ways(&stranger, &stranger), Relation::Unknown);
        assert_eq!(stranger.shares(&stranger, Namespace::Network), Answer::Unknown);
    }

    #[test]
    fn names_and_machine_ids_decide_nothing() {
        let other = Place { boot: HostKey::of_boot_id(&"c".repeat(32)), ..place() };
        assert_eq!(both_ways(&place(), &other), Relation::OtherHost);
        let container = Place { machine: None, process: None, ..place() };
        assert_eq!(both_ways(&place(), &container), Relation::SameHost);
    }

    #[test]
    fn a_process_is_one_only_with_number_start_and_namespace() {
        assert_eq!(both_ways(&place(), &place()), Relation::SameProcess);
        let mut other = place();
        other.process = Some(Process { pid: 7, start_ticks: 101 });
        assert_eq!(both_ways(&place(), &other), Relation::SameHost, "the number was used again");
        let mut other = place();
        other.namespaces.pid = Some(9);
        assert_eq!(both_ways(&place(), &other), Relation::SameHost, "the same number in another container");
        let mut unknown = place();
        unknown.namespaces.pid = None;
        assert_eq!(both_ways(&unknown, &unknown), Relation::SameHost);
    }

    #[test]
    fn namespaces_compare_on_one_host_only() {
        let mut other = place();
        other.process = None;
        assert_eq!(place().shares(&other, Namespace::Network), Answer::Yes);
        other.namespaces.ipc = Some(99);
        assert_eq!(place().shares(&other, Namespace::Ipc), Answer::No);
        other.namespaces.pid = None;
        assert_eq!(place().shares(&other, Namespace::Pid), Answer::Unknown);
        other.boot = HostKey::of_boot_id(&"c".repeat(32));
        assert_eq!(place().shares(&other, Namespace::Network), Answer::No);
    }
}
