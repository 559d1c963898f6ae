//! The kernel's words for the state of a port, each with the number before it (`4: ACTIVE`). A pair that is not in the
//! table is not known, and never taken for the nearest one.

use serde::{Deserialize, Serialize};

/// Whether a port can carry traffic (`enum ib_port_state` of Linux).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// No change of state; a port is not found in it.
    Nop,
    /// No link.
    Down,
    /// A link, and no subnet manager that brought the port up.
    Init,
    /// Configured, and not yet let go.
    Armed,
    /// Up.
    Active,
    /// Up, with the link in trouble.
    ActiveDefer,
}

/// How far a physical link came (`enum ib_port_phys_state` of Linux).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PhysState {
    /// Asleep.
    Sleep,
    /// Looking for the other end.
    Polling,
    /// Switched off.
    Disabled,
    /// Agreeing with the other end.
    Training,
    /// Up.
    LinkUp,
    /// Mending errors.
    ErrorRecovery,
    /// Under test.
    Test,
}

/// What a port's link speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// The driver names none, as EFA's does.
    Unspecified,
}

impl PortState {
    /// Reads `4: ACTIVE`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        numbered(
            text,
            &[
                (0, "NOP", Self::Nop),
                (1, "DOWN", Self::Down),
                (2, "INIT", Self::Init),
                (3, "ARMED", Self::Armed),
                (4, "ACTIVE", Self::Active),
                (5, "ACTIVE_DEFER", Self::ActiveDefer),
            ],
        )
    }
}

impl PhysState {
    /// Reads `5: LinkUp`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        numbered(
            text,
            &[
                (1, "Sleep", Self::Sleep),
                (2, "Polling", Self::Polling),
                (3, "Disabled", Self::Disabled),
                (4, "PortConfigurationTraining", Self::Training),
                (5, "LinkUp", Self::LinkUp),
                (6, "LinkErrorRecovery", Self::ErrorRecovery),
                (7, "Phy Test", Self::Test),
            ],
        )
    }
}

impl LinkLayer {
    /// Reads the word of `link_layer`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "InfiniBand" => Some(Self::InfiniBand),
            "Ethernet" => Some(Self::Ethernet),
            "Unknown" => Some(Self::Unspecified),
            _ => None,
        }
    }
}

fn numbered<T: Copy>(text: &str, table: &[(u8, &str, T)]) -> Option<T> {
    let (number, word) = text.split_once(": ")?;
    let number: u8 = number.parse().ok()?;
    table.iter().find(|row| row.0 == number && row.1 == word).map(|row| row.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_with_their_numbers() {
        assert_eq!(PortState::parse("4: ACTIVE"), Some(PortState::Active));
        assert_eq!(PortState::parse("1: DOWN"), Some(PortState::Down));
        assert_eq!(PortState::parse("5: ACTIVE_DEFER"), Some(PortState::ActiveDefer));
        assert_eq!(PhysState::parse("7: Phy Test"), Some(PhysState::Test));
    }

    #[test]
    fn a_word_that_does_not_fit_its_number_is_not_known() {
        for text in ["4: DOWN", "6: UNKNOWN", "ACTIVE", "4:ACTIVE", "4: active", "", "9: ACTIVE"] {
            assert_eq!(PortState::parse(text), None, "{text}");
        }
        assert_eq!(PhysState::parse("0: <unknown>"), None);
    }

    #[test]
    fn a_driver_without_link_layer_says_unknown() {
        assert_eq!(LinkLayer::parse("Unknown"), Some(LinkLayer::Unspecified));
        assert_eq!(LinkLayer::parse("Token Ring"), None);
    }
}
