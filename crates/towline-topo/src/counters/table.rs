//! Which files count a port's bytes, by driver. A driver that is not here has no counter that anybody checked, and
//! none is guessed for it.
//!
//! Sources, of Linux unless named otherwise:
//! - `port_xmit_data`, `port_rcv_data`: `Documentation/ABI/stable/sysfs-class-infiniband` (octets divided by 4, on all
//!   virtual lanes: the PortCounters of the InfiniBand specification's performance management). On RoCE, mlx5 fills them with RDMA traffic alone (`drivers/infiniband/hw/mlx5/mad.c`).
//! - EFA: `drivers/infiniband/hw/efa/efa_verbs.c`, and Amazon's guide to the driver's metrics. `rdma_read_resp_bytes` is
//!   left out: published pages differ on its direction.
//! - bnxt: `drivers/infiniband/hw/bnxt_re/hw_counters.c` (unicast bytes of the RoCE context). The driver that sysfs names
//!   is that of the PCI function, `bnxt_en`.
//! - rxe: `drivers/infiniband/sw/rxe/rxe_hw_counters.c` counts packets only.

use serde::{Deserialize, Serialize};

/// Which way bytes went, seen from this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Out of the port.
    Sent,
    /// Into the port.
    Received,
}

/// Which traffic a counter takes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Everything the port carried.
    All,
    /// What one-sided reads moved.
    RdmaRead,
    /// What one-sided writes moved.
    RdmaWrite,
}

/// What a counter does when it can count no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// It stays at all ones, of 32 bits or 64: the value then tells nothing.
    Stops,
    /// 64 bits of bytes are beyond reach: at 800 Gb/s they last for five years.
    BeyondReach,
}

/// A file that counts bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// The file, under the port's folder or the interface's.
    pub file: &'static str,
    /// Which way.
    pub direction: Direction,
    /// Which traffic.
    pub scope: Scope,
    /// How many bytes one count stands for.
    pub unit_bytes: u32,
    /// What it does at its end.
    pub limit: Limit,
}

/// The counters that a driver's ports have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverCounters {
    /// The driver, as [`crate::rdma::RdmaDevice::driver`] names it.
    pub driver: &'static str,
    /// Its byte counters; none where it is known to count no bytes.
    pub counters: &'static [Counter],
}

/// A counter of bytes that does not stop.
const fn bytes(file: &'static str, direction: Direction, scope: Scope) -> Counter {
    Counter { file, direction, scope, unit_bytes: 1, limit: Limit::BeyondReach }
}

/// A counter of 4-byte words. Where a kernel or device has the 32-bit set only, the file of the same name stops after
/// 16 GiB; a recorded QLogic port shows just that.
const fn words(file: &'static str, direction: Direction) -> Counter {
    Counter { file, direction, scope: Scope::All, unit_bytes: 4, limit: Limit::Stops }
}

const PORT_COUNTERS: &[Counter] = &[
    words("counters/port_xmit_data", Direction::Sent),
    words("counters/port_rcv_data", Direction::Received),
];

/// The drivers whose counters are known.
pub static DRIVERS: &[DriverCounters] = &[
    DriverCounters { driver: "mlx5_core", counters: PORT_COUNTERS },
    DriverCounters { driver: "mlx4_core", counters: PORT_COUNTERS },
    DriverCounters { driver: "ib_qib", counters: PORT_COUNTERS },
    DriverCounters {
        driver: "efa",
        counters: &[
            bytes("hw_counters/tx_bytes", Direction::Sent, Scope::All),
            bytes("hw_counters/rx_bytes", Direction::Received, Scope::All),
            bytes("hw_counters/rdma_read_bytes", Direction::Received, Scope::RdmaRead),
            bytes("hw_counters/rdma_write_bytes", Direction::Sent, Scope::RdmaWrite),
            bytes("hw_counters/rdma_write_recv_bytes", Direction::Received, Scope::RdmaWrite),
        ],
    },
    DriverCounters {
        driver: "bnxt_en",
        counters: &[
            bytes("hw_counters/tx_bytes", Direction::Sent, Scope::All),
            bytes("hw_counters/rx_bytes", Direction::Received, Scope::All),
        ],
    },
    DriverCounters { driver: "rdma_rxe", counters: &[] },
];

/// The counters of every network interface (`Documentation/ABI/testing/sysfs-class-net-statistics`): whole frames, of
/// all that the kernel sent and received. RDMA traffic passes them by on most devices.
pub static NETDEV: &[Counter] = &[
    bytes("statistics/tx_bytes", Direction::Sent, Scope::All),
    bytes("statistics/rx_bytes", Direction::Received, Scope::All),
];

/// The counters of a driver, if somebody checked them.
pub fn of_driver(driver: &str) -> Option<&'static DriverCounters> {
    DRIVERS.iter().find(|known| known.driver == driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_driver_that_counts_has_one_total_each_way() {
        let lists = DRIVERS.iter().map(|known| known.counters).chain([NETDEV]);
        for counters in lists.filter(|counters| !counters.is_empty()) {
            for direction in [Direction::Sent, Direction::Received] {
                let total =
                    |counter: &&Counter| counter.scope == Scope::All && counter.direction == direction;
                assert_eq!(counters.iter().filter(total).count(), 1, "{counters:?}");
            }
        }
    }

    #[test]
    fn a_driver_stands_in_the_table_once() {
        let mut names: Vec<_> = DRIVERS.iter().map(|known| known.driver).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DRIVERS.len());
        assert!(of_driver("ice").is_none());
    }
}
