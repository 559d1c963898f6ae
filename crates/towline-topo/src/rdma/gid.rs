//! The addresses of a port. A peer is reached through one of them, and on Ethernet its type and interface decide
//! whether packets are routed.

use std::net::Ipv6Addr;

use serde::{Deserialize, Serialize};

use super::state::LinkLayer;
use crate::gap::{Gap, Reason};
use crate::label::Label;
use crate::reader::Reader;

/// Most addresses kept of one port: a table has up to 1,024 places, and each address in use belongs to an interface.
pub const GIDS_MAX: usize = 256;

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gid {
    /// Its place in the port's table.
    pub index: u32,
    /// The address; an IPv4 address stands in it as `::ffff:a.b.c.d`.
    pub address: Ipv6Addr,
    /// What it is used with. Kernels before 4.4 don't tell.
    pub kind: Option<GidKind>,
    /// The interface it belongs to, on Ethernet.
    pub netdev: Option<Label>,
}

/// What an address is used with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GidKind {
    /// InfiniBand, or RoCE version 1, which stays in one Ethernet segment.
    IbOrRoceV1,
    /// RoCE version 2, in UDP, which is routed.
    RoceV2,
}

impl GidKind {
    /// Reads the text of `gid_attrs/types/N`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "IB/RoCE v1" => Some(Self::IbOrRoceV1),
            "RoCE v2" => Some(Self::RoceV2),
            _ => None,
        }
    }
}

/// The addresses in use of the port at `at`.
pub(crate) fn read(reader: &mut Reader<'_>, at: &str, link_layer: Option<LinkLayer>) -> Vec<Gid> {
    let table = format!("{at}/gids");
    let indexes = reader.numbers(&table);
    // Asked once: a kernel without types has none for any address.
    let types = format!("{at}/gid_attrs/types");
    let typed = !indexes.is_empty() && !reader.list(&types).is_empty();
    let mut gids = Vec::new();
    for index in indexes {
        let Some(address) = reader.field(&format!("{table}/{index}"), "an address", |text| text.parse().ok())
        else {
            continue;
        };
        if !in_use(address) {
            continue;
        }
        if gids.len() == GIDS_MAX {
            reader.gaps.push(Gap::new(&table, Reason::TooMany { entries_max: GIDS_MAX as u64 }));
            break;
        }
        let kind = typed.then(|| reader.field(&format!("{types}/{index}"), "a GID type", GidKind::parse));
        let netdev = (link_layer == Some(LinkLayer::Ethernet))
            .then(|| reader.label(&format!("{at}/gid_attrs/ndevs/{index}")));
        gids.push(Gid { index, address, kind: kind.flatten(), netdev: netdev.flatten() });
    }
    gids
}

/// Whether somebody has it: places not in use are zeros, or a prefix without an interface.
fn in_use(address: Ipv6Addr) -> bool {
    let [.., a, b, c, d] = address.segments();
    [a, b, c, d] != [0; 4]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_places_of_the_table_are_not_in_use() {
        let used = |text: &str| in_use(text.parse().unwrap());
        assert!(used("fe80:0000:0000:0000:0011:7500:0077:cfc8"));
        assert!(used("0000:0000:0000:0000:0000:ffff:c000:0201"));
        assert!(!used("0000:0000:0000:0000:0000:0000:0000:0000"));
        assert!(!used("fe80:0000:0000:0000:0000:0000:0000:0000"), "as InfiniBand drivers fill theirs");
    }

    #[test]
    fn types_are_the_two_of_the_kernel() {
        assert_eq!(GidKind::parse("IB/RoCE v1"), Some(GidKind::IbOrRoceV1));
        assert_eq!(GidKind::parse("RoCE v2"), Some(GidKind::RoceV2));
        assert_eq!(GidKind::parse("RoCE v3"), None);
    }
}
