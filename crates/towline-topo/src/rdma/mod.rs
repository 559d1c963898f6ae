//! The RDMA ports of a machine, as sysfs shows them
//! (`Documentation/ABI/stable/sysfs-class-infiniband` of Linux is the reference for every file named here).
//!
//! sysfs does not tell a port's active MTU; asking for it takes verbs. What it tells of the rate is the driver's word:
//! soft-RoCE says 10 Gb/s whatever carries it, and drivers that don't know their speed are printed as SDR.

mod device;
mod gid;
mod rate;
mod state;

use serde::{Deserialize, Serialize};

pub use self::device::{DeviceKind, PciAddress, RdmaDevice};
pub use self::gid::{GIDS_MAX, Gid, GidKind};
pub use self::rate::LinkRate;
pub use self::state::{LinkLayer, PhysState, PortState};
use crate::gap::{Gap, Gaps, Reason};
use crate::label::Label;
use crate::reader::Reader;
use crate::system::System;

/// Most ports of a machine: hundreds of virtual functions may show on a host of virtual machines.
pub const PORTS_MAX: usize = 512;

/// Where the kernel shows RDMA devices.
pub(crate) const CLASS: &str = "/sys/class/infiniband";

/// One port of an RDMA device. A field without a value is not known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RdmaPort {
    /// The device it is a port of.
    pub device: RdmaDevice,
    /// Its number on the device, from 1.
    pub number: u32,
    /// Whether it can carry traffic.
    pub state: Option<PortState>,
    /// How far the physical link came.
    pub phys_state: Option<PhysState>,
    /// The speed of the link, as the driver gives it.
    pub rate: Option<LinkRate>,
    /// What the link speaks.
    pub link_layer: Option<LinkLayer>,
    /// Its local id in the subnet; 0 where there is no subnet manager, as on Ethernet.
    pub lid: Option<u32>,
    /// The local id of the subnet manager; 0 without one.
    pub sm_lid: Option<u32>,
    /// Its addresses in use, by index.
    pub gids: Vec<Gid>,
}

impl RdmaPort {
    /// Reads all ports of a machine, by device and number.
    pub fn read_all(system: &dyn System) -> (Vec<Self>, Gaps) {
        let mut reader = Reader::new(system);
        let ports = read_with(&mut reader);
        (ports, reader.gaps)
    }

    /// Device and port as tools print them: `mlx5_0/1`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.device.name, self.number)
    }

    /// Its folder in sysfs.
    pub(crate) fn folder(&self) -> String {
        folder(&self.device.name, self.number)
    }

    fn read(reader: &mut Reader<'_>, device: &RdmaDevice, number: u32) -> Self {
        let at = folder(&device.name, number);
        let link_layer = reader.field(&format!("{at}/link_layer"), "a link layer", LinkLayer::parse);
        Self {
            device: device.clone(),
            number,
            state: reader.field(&format!("{at}/state"), "a port state", PortState::parse),
            phys_state: reader.field(&format!("{at}/phys_state"), "a physical state", PhysState::parse),
            rate: reader.field(
                &format!("{at}/rate"),
                "a rate such as `100 Gb/sec (4X EDR)`",
                LinkRate::parse,
            ),
            link_layer,
            lid: reader.field(&format!("{at}/lid"), "a number such as `0x1`", hexadecimal),
            sm_lid: reader.field(&format!("{at}/sm_lid"), "a number such as `0x1`", hexadecimal),
            gids: gid::read(reader, &at, link_layer),
        }
    }
}

pub(crate) fn read_with(reader: &mut Reader<'_>) -> Vec<RdmaPort> {
    // A kernel without RDMA has no such class, which is knowledge; a machine without classes at all is a gap.
    if !reader.list("/sys/class").iter().any(|class| class == "infiniband") {
        return Vec::new();
    }
    let mut ports = Vec::new();
    for name in reader.list(CLASS) {
        let label = Label::part(&name).ok_or_else(|| Gap::unparsable(CLASS, "the name of a device", &name));
        let Some(label) = reader.gaps.keep(label) else { continue };
        let device = RdmaDevice::read(reader, label);
        for number in reader.numbers(&format!("{CLASS}/{}/ports", device.name)) {
            if ports.len() == PORTS_MAX {
                reader.gaps.push(Gap::new(CLASS, Reason::TooMany { entries_max: PORTS_MAX as u64 }));
                return ports;
            }
            ports.push(RdmaPort::read(reader, &device, number));
        }
    }
    ports
}

fn folder(device: &Label, number: u32) -> String {
    format!("{CLASS}/{device}/ports/{number}")
}

/// `0x12a`.
fn hexadecimal(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x")?;
    let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_local_id_is_hexadecimal() {
        assert_eq!(hexadecimal("0x12a"), Some(0x12a));
        for text in ["12a", "0x", "0x+1", "0x123456789"] {
            assert_eq!(hexadecimal(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let text = String::from_utf8_lossy(&bytes);
            let _ = (hexadecimal(&text), LinkRate::parse(&text), PortState::parse(&text), PhysState::parse(&text));
            let _ = (LinkLayer::parse(&text), GidKind::parse(&text), PciAddress::parse(&text));
        }

        #[test]
        fn whatever_looks_like_a_rate_is_read_or_refused(text in "[0-9.e-]{0,6} Gb/sec \\([0-9]{0,4}X ?[A-Z0-9]{0,9}\\)") {
            if let Some(rate) = LinkRate::parse(&text) {
                prop_assert!(rate.link_gbps.is_finite() && rate.link_gbps > 0.0);
            }
        }
    }
}
