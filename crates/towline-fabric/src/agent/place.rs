//! Where agents run, as it stands on their cards.
//!
//! A place is read once, when an agent starts (a dozen small files, 0.2 ms). What could not be read is a field without a
//! value, and a line in the log; a place that can't be understood is one of which nothing is known.

use towline_topo::place::{PLACE_JSON_BYTES_MAX, Place};
use towline_topo::system::System;
use towline_wire::card::{AgentCard, PLACE_BYTES_MAX};

// Every place fits on a card.
const _: () = assert!(PLACE_JSON_BYTES_MAX <= PLACE_BYTES_MAX);

/// Reads where this process runs.
pub(super) fn read(system: &dyn System) -> Place {
    let (place, gaps) = Place::read(system);
    for gap in &gaps.list {
        tracing::debug!(%gap, "not known of this process's place");
    }
    place
}

/// As text for a card; empty, so not said, only if it can't be written.
pub(super) fn to_json(place: &Place) -> String {
    serde_json::to_string(place).unwrap_or_default()
}

/// Where the agent of `card` says that it runs.
pub(super) fn of(card: &AgentCard) -> Place {
    if card.place.is_empty() {
        return Place::default();
    }
    serde_json::from_str(&card.place).unwrap_or_else(|error| {
        tracing::warn!(peer = %card.agent, %error, "the peer's place can't be understood");
        Place::default()
    })
}

/// For a person: host, CPUs, NUMA nodes; `?` is what is not known.
pub(super) fn describe(place: &Place) -> String {
    let text = |value: Option<String>| value.unwrap_or_else(|| "?".into());
    let host = text(place.host_name.as_ref().map(ToString::to_string));
    let cpus = text(place.cpus.as_ref().map(ToString::to_string));
    let nodes = text(place.numa_nodes.as_ref().map(ToString::to_string));
    format!("{host} cpus {cpus} numa {nodes}")
}

#[cfg(test)]
mod tests {
    use towline_topo::gap::{Gap, Reason};

    use super::*;

    /// A machine that tells nothing but its name.
    struct Mute;

    impl System for Mute {
        fn read(&self, path: &str) -> Result<String, Gap> {
            match path {
                "/proc/sys/kernel/hostname" => Ok("node-7\n".into()),
                _ => Err(Gap::new(path, Reason::Denied)),
            }
        }

        fn list(&self, path: &str) -> Result<Vec<String>, Gap> {
            Err(Gap::new(path, Reason::Absent))
        }

        fn link(&self, path: &str) -> Result<String, Gap> {
            Err(Gap::new(path, Reason::Absent))
        }
    }

    #[test]
    fn what_cannot_be_read_is_a_field_without_a_value() {
        let place = read(&Mute);
        assert_eq!((place.boot, &place.cpus, &place.numa_nodes), (None, &None, &None));
        assert_eq!(describe(&place), "node-7 cpus ? numa ?");
        assert_eq!(serde_json::from_str::<Place>(&to_json(&place)).unwrap(), place);
    }
}
