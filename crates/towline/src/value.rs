//! How the text of a flag becomes a value, and what is said when it can't.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// A number of bytes, written with a unit: `512MiB`, `2GB`, `65536`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteSize(pub(crate) u64);

/// Binary units are what memory is sold in; decimal ones are what disks and wires are.
const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let explain = || "write a whole number with a unit, for example 512MiB, 1GiB or 2GB".to_owned();
        let (number, scale) = UNITS
            .iter()
            .find_map(|(unit, scale)| text.strip_suffix(unit).map(|number| (number.trim_end(), *scale)))
            .unwrap_or((text, 1));
        let number: u64 = number.parse().map_err(|_| explain())?;
        match number.checked_mul(scale) {
            Some(0) => Err("must be more than 0".to_owned()),
            Some(bytes) => Ok(Self(bytes)),
            None => Err("more bytes than 64 bits count".to_owned()),
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS[..4].iter().rev().find(|(_, scale)| self.0.is_multiple_of(*scale));
        match exact {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}B", self.0),
        }
    }
}

/// An address to listen on. Names are not resolved: which interface is meant should be plain.
pub(crate) fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "write an IP address and a port, for example 127.0.0.1:8000 or [::1]:0".to_owned())
}

/// A sampling temperature.
pub(crate) fn temperature(text: &str) -> Result<f32, String> {
    let fits = |value: &f32| (0.0..=2.0).contains(value);
    text.parse().ok().filter(fits).ok_or_else(|| "write a number from 0 to 2".to_owned())
}

/// A nucleus: the share of probability that is sampled from.
pub(crate) fn top_p(text: &str) -> Result<f32, String> {
    let fits = |value: &f32| *value > 0.0 && *value <= 1.0;
    text.parse().ok().filter(fits).ok_or_else(|| "write a number above 0, to 1".to_owned())
}

/// A rate in 10⁹ bytes a second.
pub(crate) fn gb_per_s(text: &str) -> Result<f64, String> {
    let fits = |value: &f64| (0.0..=10_000.0).contains(value);
    text.parse().ok().filter(fits).ok_or_else(|| "write a number of GB/s from 0 to 10000".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_sizes_take_units_and_print_back_exactly() {
        for (text, bytes, printed) in [
            ("1GiB", 1 << 30, "1GiB"),
            ("1536 MiB", 1536 << 20, "1536MiB"),
            ("2GB", 2_000_000_000, "1953125KiB"),
            ("4096", 4096, "4KiB"),
            ("7B", 7, "7B"),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, printed), "{text}");
            assert_eq!(size.to_string().parse(), Ok(size));
        }
    }

    #[test]
    fn byte_sizes_refuse_nonsense() {
        for bad in ["", "0", "0GiB", "-1", "1.5GiB", "GiB", "1gib", "99999999TiB"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn sampling_numbers_have_bounds() {
        assert_eq!((temperature("0"), top_p("0.9")), (Ok(0.0), Ok(0.9)));
        assert!(["-1", "2.1", "NaN", "inf", "x"].iter().all(|bad| temperature(bad).is_err()));
        assert!(["0", "1.01", "NaN", "x"].iter().all(|bad| top_p(bad).is_err()));
    }

    #[test]
    fn listen_addresses_need_a_host() {
        assert!(listen_address("127.0.0.1:0").is_ok());
        for bad in [":0", "8000", "localhost:8000", "127.0.0.1", ""] {
            assert!(listen_address(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
