//! 64-bit numbers as text: many JSON readers keep only 53 bits of a number.

use std::fmt::Display;

use serde::{Deserialize, Deserializer, Serializer};

use crate::id::{BootEpoch, Generation, LeaseId};

pub(super) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(super) fn deserialize<'de, T: From64, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map(T::from_64).map_err(serde::de::Error::custom)
}

pub(super) trait From64 {
    fn from_64(value: u64) -> Self;
}

impl From64 for BootEpoch {
    fn from_64(value: u64) -> Self {
        Self(value)
    }
}

impl From64 for LeaseId {
    fn from_64(value: u64) -> Self {
        Self(value)
    }
}

impl From64 for Generation {
    fn from_64(value: u64) -> Self {
        Self(value)
    }
}
