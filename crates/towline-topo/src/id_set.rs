//! Sets of small numbers (CPUs, NUMA nodes) in the kernel's list form, `0-3,8,10-11`.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A set of numbers below 65,536, kept as ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdSet {
    /// Inclusive, ascending, neither overlapping nor adjacent.
    ranges: Vec<(u16, u16)>,
}

/// Text that is no list of numbers, or one with too many ranges. Trying again does not help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a list of numbers below 65536 reads like `0-3,8`, with {} ranges at most", IdSet::RANGES_MAX)]
pub struct IdSetError;

impl IdSet {
    /// Most ranges: every second CPU of 512, and still under 3 KiB as text.
    pub const RANGES_MAX: usize = 256;

    /// Reads the kernel's list form; nothing but white space is the empty set.
    ///
    /// # Errors
    /// [`IdSetError`] for any other text, for a backward range and for too many ranges.
    pub fn parse(text: &str) -> Result<Self, IdSetError> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        Self::from_ranges(ranges.ok_or(IdSetError)?)
    }

    /// The set of these numbers.
    ///
    /// # Errors
    /// [`IdSetError`] when they need too many ranges.
    pub fn from_ids(ids: impl IntoIterator<Item = u16>) -> Result<Self, IdSetError> {
        Self::from_ranges(ids.into_iter().map(|id| (id, id)).collect())
    }

    fn from_ranges(mut ranges: Vec<(u16, u16)>) -> Result<Self, IdSetError> {
        ranges.sort_unstable();
        let mut merged: Vec<(u16, u16)> = Vec::new();
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(open) if u32::from(first) <= u32::from(open.1) + 1 => open.1 = open.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        if merged.len() > Self::RANGES_MAX { Err(IdSetError) } else { Ok(Self { ranges: merged }) }
    }

    /// How many numbers it holds.
    pub fn count(&self) -> u32 {
        self.ranges.iter().map(|(first, last)| u32::from(last - first) + 1).sum()
    }

    /// Whether some number is in both.
    pub fn intersects(&self, other: &Self) -> bool {
        let meets = |a: &(u16, u16)| other.ranges.iter().any(|b| a.0 <= b.1 && b.0 <= a.1);
        self.ranges.iter().any(meets)
    }
}

/// `3` or `0-3`.
fn range(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some((first, last))
}

impl fmt::Display for IdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        Ok(())
    }
}

impl TryFrom<String> for IdSet {
    type Error = IdSetError;

    fn try_from(text: String) -> Result<Self, IdSetError> {
        Self::parse(&text)
    }
}

impl From<IdSet> for String {
    fn from(set: IdSet) -> Self {
        set.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_prints_them() {
        for (text, count, printed) in [
            ("0-1\n", 2, "0-1"),
            (" 0,4,8,12", 4, "0,4,8,12"),
            ("0,8,250-255", 8, "0,8,250-255"),
            ("\n", 0, ""),
            ("5-5", 1, "5"),
            ("3,0-2,2-4", 5, "0-4"),
        ] {
            let set = IdSet::parse(text).unwrap();
            assert_eq!((set.count(), set.to_string().as_str()), (count, printed), "{text:?}");
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["x", "3-1", "1,", ",", "-1", "1-2-3", "70000", "+1", "0x3", "0-31:1/2"] {
            assert!(IdSet::parse(text).is_err(), "{text:?}");
        }
        let every_second = |count: u16| IdSet::from_ids((0..count).map(|n| n * 2));
        assert!(every_second(256).is_ok());
        assert!(every_second(257).is_err());
    }

    #[test]
    fn sets_meet_only_where_both_have_a_number() {
        let set = |text| IdSet::parse(text).unwrap();
        assert!(set("0-3").intersects(&set("3-5")));
        assert!(!set("0-3,6").intersects(&set("4-5,7")));
        assert!(!set("").intersects(&set("0-65535")));
    }

    proptest! {
        #[test]
        fn printing_and_reading_agree(ids in proptest::collection::vec(any::<u16>(), 0..200)) {
            let set = IdSet::from_ids(ids.iter().copied()).unwrap();
            prop_assert_eq!(IdSet::parse(&set.to_string()).unwrap(), set);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9,\\- x]{0,64}") {
            let _ = IdSet::parse(&text);
        }
    }
}
