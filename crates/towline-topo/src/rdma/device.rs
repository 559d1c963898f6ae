//! The device behind a port: which driver, where on the bus, near which memory.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::CLASS;
use crate::gap::{Gap, Reason};
use crate::label::Label;
use crate::reader::Reader;

/// The driver of Amazon's Elastic Fabric Adapter.
const EFA: &str = "efa";

/// The kernel module of soft-RoCE, which has no device to be the driver of.
const SOFT_ROCE: &str = "rdma_rxe";

/// An RDMA device. A field without a value is not known, or, of a device made of software, not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// Its name, as verbs and libraries take it.
    pub name: Label,
    /// Its GUID, as the kernel prints it: `0011:7500:0077:cfc8`.
    pub node_guid: Option<Label>,
    /// The version of its firmware, as the driver gives it.
    pub firmware: Option<Label>,
    /// The driver bound to it, or, of a device made of software, the kernel module.
    pub driver: Option<Label>,
    /// Its place on the PCI bus.
    pub pci: Option<PciAddress>,
    /// The NUMA node it hangs on.
    pub numa_node: Option<u16>,
}

/// What a device is, as far as that changes what may be claimed of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Amazon's adapter: reached through libfabric, with counters of its own.
    Efa,
    /// Soft-RoCE: the kernel speaks RoCE over any interface. It proves semantics, and is no RDMA hardware.
    SoftRoce,
    /// A device with another driver.
    Other,
    /// Its driver is not known.
    Unknown,
}

impl RdmaDevice {
    /// What it is, by its driver.
    pub fn kind(&self) -> DeviceKind {
        match self.driver.as_ref().map(Label::as_str) {
            Some(EFA) => DeviceKind::Efa,
            Some(SOFT_ROCE) => DeviceKind::SoftRoce,
            Some(_) => DeviceKind::Other,
            None => DeviceKind::Unknown,
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>, name: Label) -> Self {
        let at = format!("{CLASS}/{name}");
        let node_guid = reader.field(&format!("{at}/node_guid"), "a GUID", guid);
        // A device made of software hangs on no bus, and has no firmware.
        let software = reader.system.link(&at).is_ok_and(|target| target.contains("/devices/virtual/"));
        if software {
            let driver = software_driver(reader, &at);
            return Self { name, node_guid, firmware: None, driver, pci: None, numa_node: None };
        }
        Self {
            name,
            node_guid,
            firmware: reader.label(&format!("{at}/fw_ver")),
            driver: reader
                .link(&format!("{at}/device/driver"), "a driver", |target| Label::part(last(target))),
            pci: reader
                .link(&format!("{at}/device"), "a PCI device", |target| PciAddress::parse(last(target))),
            numa_node: numa_node(reader, &format!("{at}/device/numa_node")),
        }
    }
}

/// rxe alone of the software drivers shows the interface it runs over in `parent`
/// (`parent_show` in Linux's `drivers/infiniband/sw/rxe/rxe_verbs.c`); its device names are the user's choice.
fn software_driver(reader: &mut Reader<'_>, at: &str) -> Option<Label> {
    reader.label(&format!("{at}/parent")).and_then(|_| Label::new(SOFT_ROCE).ok())
}

/// The node of a device. The kernel prints -1 where firmware does not tell.
fn numa_node(reader: &mut Reader<'_>, path: &str) -> Option<u16> {
    let node: i32 = reader.field(path, "a NUMA node", |text| text.parse().ok().filter(|node| *node >= -1))?;
    let known = u16::try_from(node).map_err(|_| Gap::new(path, Reason::Unset));
    reader.gaps.keep(known)
}

fn last(target: &str) -> &str {
    target.rsplit('/').next().unwrap_or(target)
}

/// Four groups of four digits; zeros are a GUID that nobody set.
fn guid(text: &str) -> Option<Label> {
    let group = |group: &str| group.len() == 4 && group.bytes().all(|b| b.is_ascii_hexdigit());
    let fits = text.split(':').count() == 4 && text.split(':').all(group);
    let set = text.bytes().any(|b| b != b'0' && b != b':');
    (fits && set).then(|| Label::new(text).ok()).flatten()
}

/// A device's place on the PCI bus: domain (up to 32 bits), bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// Reads `0000:43:00.0`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
        let (device, function) = rest.split_once('.')?;
        let number = |digits: &str, length: std::ops::RangeInclusive<usize>| {
            let fits = length.contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            fits.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
        };
        Some(Self {
            domain: number(domain, 4..=8)?,
            bus: u8::try_from(number(bus, 2..=2)?).ok()?,
            device: u8::try_from(number(device, 2..=2)?).ok().filter(|device| *device < 32)?,
            function: u8::try_from(number(function, 1..=1)?).ok().filter(|function| *function < 8)?,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for PciAddress {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("a PCI address reads like 0000:43:00.0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_read_with_domains_of_four_to_eight_digits() {
        for text in ["0000:43:00.0", "10000:e1:1f.7", "ffffffff:00:00.0"] {
            assert_eq!(PciAddress::parse(text).unwrap().to_string(), text);
        }
        for text in ["43:00.0", "mlx5_core.sf.4", "0000:43:20.0", "0000:43:00.8", "0000:43:00.0:1", "virtio0"]
        {
            assert_eq!(PciAddress::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_guid_of_zeros_is_none() {
        assert!(guid("0011:7500:0077:cfc8").is_some());
        for text in ["0000:0000:0000:0000", "0011:7500:0077", "0011:7500:0077:cfcg", "0x0011"] {
            assert_eq!(guid(text), None, "{text}");
        }
    }

    #[test]
    fn a_device_is_what_its_driver_is() {
        let device = |driver: Option<&str>| RdmaDevice {
            name: Label::new("x").unwrap(),
            node_guid: None,
            firmware: None,
            driver: driver.map(|driver| Label::new(driver).unwrap()),
            pci: None,
            numa_node: None,
        };
        assert_eq!(device(Some("efa")).kind(), DeviceKind::Efa);
        assert_eq!(device(Some("rdma_rxe")).kind(), DeviceKind::SoftRoce);
        assert_eq!(device(Some("mlx5_core")).kind(), DeviceKind::Other);
        assert_eq!(device(None).kind(), DeviceKind::Unknown);
    }
}
