//! The rate of a link as the kernel prints it: `200 Gb/sec (4X HDR)`.

use serde::{Deserialize, Serialize};

use crate::label::Label;

/// The speed of a link, as its driver gives it.
///
/// `link_gbps` is the kernel's product of lanes and speed, rounded as it rounds (FDR counts 14 Gb/s a lane), with the
/// line coding not taken off: it bounds a transfer and does not predict it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkRate {
    /// In 10⁹ bits a second.
    pub link_gbps: f64,
    /// How many lanes it has.
    pub lanes: u8,
    /// The name of the speed (SDR, … HDR, NDR, XDR). Older kernels print none for SDR, and SDR for speeds they don't
    /// know.
    pub speed: Option<Label>,
}

impl LinkRate {
    /// Fastest rate taken for one, in 10⁹ bits a second: 32 times the fastest link there is (XDR, four lanes).
    const GBPS_MAX: f64 = 25_600.0;

    /// Reads the text of `rate`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (number, rest) = text.split_once(" Gb/sec (")?;
        let (lanes, speed) = rest.strip_suffix(')')?.split_once('X')?;
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let link_gbps: f64 = number.parse().ok().filter(|_| plain)?;
        let fits = link_gbps > 0.0 && link_gbps <= Self::GBPS_MAX;
        let lanes = lanes.parse().ok().filter(|lanes| *lanes > 0)?;
        fits.then_some(Self { link_gbps, lanes, speed: name(speed)? })
    }
}

/// ` HDR`, or nothing.
fn name(text: &str) -> Option<Option<Label>> {
    if text.is_empty() {
        return Some(None);
    }
    let name = text.strip_prefix(' ')?;
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric());
    plain.then(|| Label::new(name).ok()).flatten().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_kernels_print_them() {
        for (text, link_gbps, lanes, speed) in [
            ("200 Gb/sec (4X HDR)", 200.0, 4, Some("HDR")),
            ("100 Gb/sec (2X HDR)", 100.0, 2, Some("HDR")),
            ("100 Gb/sec (1X NDR)", 100.0, 1, Some("NDR")),
            ("800 Gb/sec (4X XDR)", 800.0, 4, Some("XDR")),
            ("56 Gb/sec (4X FDR)", 56.0, 4, Some("FDR")),
            ("10 Gb/sec (1X FDR10)", 10.0, 1, Some("FDR10")),
            ("2.5 Gb/sec (1X SDR)", 2.5, 1, Some("SDR")),
            ("10 Gb/sec (4X)", 10.0, 4, None),
        ] {
            let rate = LinkRate::parse(text).unwrap_or_else(|| panic!("{text}"));
            let got = (rate.link_gbps, rate.lanes, rate.speed.as_ref().map(Label::as_str));
            assert_eq!(got, (link_gbps, lanes, speed), "{text}");
        }
    }

    #[test]
    fn what_is_no_rate_is_not_known() {
        for text in [
            "",
            "200 Gb/sec",
            "200 Gb/sec (4X HDR",
            "200 Gbit (4X HDR)",
            "-1 Gb/sec (4X HDR)",
            "inf Gb/sec (4X HDR)",
            "1e2 Gb/sec (4X HDR)",
            "+1 Gb/sec (4X HDR)",
            "0 Gb/sec (4X HDR)",
            "999999 Gb/sec (4X HDR)",
            "200 Gb/sec (0X HDR)",
            "200 Gb/sec (X HDR)",
            "200 Gb/sec (4X HDR fast)",
        ] {
            assert_eq!(LinkRate::parse(text), None, "{text}");
        }
    }
}
