//! What the initiator tells an owner, and how the owner answers. Both ends are one version of this binary.
//!
//! A command is a notification of the fabric: JSON, at most 16 KiB, with a number that no other command of the run has.
//! The answer stands in the owner's *control region*, a page that the initiator reads (one-sided, like everything
//! else) until the number shows. The owner writes the rest first, so a second read after the number is whole.
//!
//! ```text
//!  offset  u64 little-endian
//!       0  magic
//!       8  number of the last command that was carried out
//!      16  outcome: 0 done, 1 a wrong byte, 2 failed
//!      24  wrong byte: offset, expected, found, 1 if missing (four words)
//!      56  processor time of the owner, ns; all ones if unknown
//!      64  port of the flood, 0 if there is none
//!      72  token of the flood (two words)
//!      88  where the data lies in the owner's address space, 0 before there is any
//!      96  number of its file in the owner's process
//!     104  bytes of the reason for a failure, at most 512, which stand from 112 on
//! ```

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use towline_fabric::Memory;

use super::kv::RankKv;
use super::pattern::{Seed, WrongByte};
use super::shape::Shape;

/// Bytes of the control region.
pub(crate) const CONTROL_BYTES: u64 = 4096;
/// Longest reason for a failure.
const REASON_BYTES_MAX: usize = 512;
/// "TWLBNCH" and the version of layout and commands.
const MAGIC: u64 = u64::from_le_bytes(*b"TWLBNCH3");
const UNKNOWN: u64 = u64::MAX;

const DONE: u64 = 8;
const OUTCOME: u64 = 16;
const WRONG: u64 = 24;
const CPU: u64 = 56;
const FLOOD_PORT: u64 = 64;
const TOKEN: u64 = 72;
const ADDRESS: u64 = 88;
const FILE: u64 = 96;
const REASON_LEN: u64 = 104;
const REASON: u64 = 112;

/// A numbered command.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Order {
    /// Never used twice with one owner.
    pub(crate) number: u64,
    pub(crate) command: Command,
}

/// What an owner does.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Command {
    /// Have memory for it, and show it in the card.
    Prepare(Contents),
    /// Fill all of it with what such data is, or with poison.
    Fill(Filling),
    /// Check what arrived in it: for pages a seed for each group of lanes, all of one size; for a rank one.
    Check { seeds: Vec<Seed>, poison: Seed },
    /// Only answer.
    Mark,
}

/// What an owner's memory holds.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Contents {
    /// Blocks without a meaning.
    Pages(Shape),
    /// A rank's share of a prompt.
    Rank(RankKv),
}

impl Contents {
    /// Bytes of the memory; `None` when they overflow, which only a broken message does.
    pub(crate) fn region_bytes(&self) -> Option<u64> {
        match self {
            Self::Pages(shape) => shape.region_bytes(),
            Self::Rank(rank) => rank.region_bytes(),
        }
    }
}

/// What a memory is filled with.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Filling {
    /// The data of this seed.
    Data(Seed),
    /// What a destination holds before.
    Poison(Seed),
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Wrong(WrongByte),
    Failed(String),
}

/// What the control region says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The command that it answers.
    pub(crate) number: u64,
    pub(crate) outcome: Outcome,
    /// The owner's processor time when it answered.
    pub(crate) cpu: Option<Duration>,
    /// Where raw streams are served, and what opens them.
    pub(crate) flood: Option<(u16, [u64; 2])>,
    /// The data, once there is any.
    pub(crate) data: Option<Place>,
}

/// Where an owner's data is in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// In its address space.
    pub(crate) address: u64,
    /// Its file's number.
    pub(crate) file: u64,
}

/// Writes what never changes.
pub(crate) fn introduce(control: &Memory, flood: Option<(u16, [u64; 2])>) -> Result<()> {
    let (port, [first, second]) = flood.unwrap_or((0, [0; 2]));
    for (at, value) in [(0, MAGIC), (FLOOD_PORT, port.into()), (TOKEN, first), (TOKEN + 8, second)] {
        control.store_u64(at, value)?;
    }
    Ok(())
}

/// Writes where the data lies; it shows with the next answer.
pub(crate) fn show_place(control: &Memory, place: Place) -> Result<()> {
    control.store_u64(FILE, place.file)?;
    Ok(control.store_u64(ADDRESS, place.address)?)
}

/// Writes the answer to command `number`, its number last.
pub(crate) fn answer(control: &Memory, number: u64, outcome: &Outcome) -> Result<()> {
    let code = match outcome {
        Outcome::Done => 0,
        Outcome::Wrong(wrong) => {
            let words = [wrong.offset, wrong.expected, wrong.found, wrong.missing.into()];
            for (at, word) in (WRONG..).step_by(8).zip(words) {
                control.store_u64(at, word)?;
            }
            1
        }
        Outcome::Failed(reason) => {
            let bytes = &reason.as_bytes()[..reason.len().min(REASON_BYTES_MAX)];
            control.write_from(REASON, bytes)?;
            control.store_u64(REASON_LEN, bytes.len() as u64)?;
            2
        }
    };
    control.store_u64(OUTCOME, code)?;
    let cpu = super::cpu::own(super::cpu::Edge::End).and_then(|cpu| u64::try_from(cpu.as_nanos()).ok());
    control.store_u64(CPU, cpu.unwrap_or(UNKNOWN))?;
    control.store_u64(DONE, number)?;
    Ok(())
}

/// Reads a copy of a control region.
///
/// # Errors
/// When it is none of this version, or says what it can't.
pub(crate) fn read(control: &Memory) -> Result<Answer> {
    let word = |at| control.load_u64(at);
    ensure!(word(0)? == MAGIC, "the peer is no `towline bench kv --listen` of this version");
    let outcome = match word(OUTCOME)? {
        0 => Outcome::Done,
        1 => Outcome::Wrong(WrongByte {
            offset: word(WRONG)?,
            expected: word(WRONG + 8)?,
            found: word(WRONG + 16)?,
            missing: word(WRONG + 24)? == 1,
        }),
        _ => {
            let len = usize::try_from(word(REASON_LEN)?).context("no length")?.min(REASON_BYTES_MAX);
            let mut text = vec![0; len];
            control.read_into(REASON, &mut text)?;
            Outcome::Failed(String::from_utf8_lossy(&text).into_owned())
        }
    };
    let (cpu, port, address, file) = (word(CPU)?, word(FLOOD_PORT)?, word(ADDRESS)?, word(FILE)?);
    Ok(Answer {
        number: word(DONE)?,
        outcome,
        cpu: (cpu != UNKNOWN).then(|| Duration::from_nanos(cpu)),
        flood: u16::try_from(port).ok().filter(|port| *port != 0).zip(Some([word(TOKEN)?, word(TOKEN + 8)?])),
        data: (address != 0).then_some(Place { address, file }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_they_were_written() {
        let control = Memory::allocate("control", CONTROL_BYTES).unwrap();
        assert!(read(&control).is_err(), "an empty page is no control region");
        introduce(&control, Some((4711, [5, 6]))).unwrap();
        let wrong = WrongByte { offset: 1, expected: 2, found: 3, missing: true };
        for (number, outcome) in
            [(7, Outcome::Done), (8, Outcome::Wrong(wrong)), (9, Outcome::Failed("x".repeat(2000)))]
        {
            answer(&control, number, &outcome).unwrap();
            let said = read(&control).unwrap();
            assert_eq!((said.number, said.flood, said.data), (number, Some((4711, [5, 6])), None));
            match (said.outcome, outcome) {
                (Outcome::Failed(said), Outcome::Failed(_)) => assert_eq!(said.len(), REASON_BYTES_MAX),
                (said, outcome) => assert_eq!(said, outcome),
            }
        }
        let place = Place { address: 4096, file: 7 };
        show_place(&control, place).unwrap();
        assert_eq!(read(&control).unwrap().data, Some(place));
    }

    #[test]
    fn orders_fit_a_notification() {
        let order = Order {
            number: u64::MAX,
            command: Command::Check { seeds: vec![Seed(u64::MAX); 64], poison: Seed(u64::MAX) },
        };
        let bytes = serde_json::to_vec(&order).unwrap();
        assert!(bytes.len() < 16 << 10, "{}", bytes.len());
        assert_eq!(serde_json::from_slice::<Order>(&bytes).unwrap().command, order.command);
    }
}
