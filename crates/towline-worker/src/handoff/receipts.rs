//! One receipt for all that came from one rank, however many parts and lists it came in.

use std::time::Duration;

use towline_wire::receipt::{Rail, Receipt};

/// What one reading of parts moved: a receipt a list, all under way at once for `wall`.
#[derive(Debug)]
pub(super) struct Moved {
    pub(super) receipts: Vec<Receipt>,
    pub(super) wall: Duration,
}

/// Joins what came from one rank; `None` when nothing did. `seconds` is the time in which data was under way: waiting
/// for the owner to compute is not the wire's. `blocks` counts each of the rank's blocks once.
pub(super) fn join(moved: Vec<Moved>, blocks: u64) -> Option<Receipt> {
    let wall: Duration = moved.iter().map(|moved| moved.wall).sum();
    let mut receipts = moved.into_iter().flat_map(|moved| moved.receipts);
    let mut whole = receipts.next()?;
    let mut more = false;
    for receipt in receipts {
        more = true;
        add(&mut whole, receipt);
    }
    if more {
        whole.blocks = blocks;
        whole.seconds = wall.as_secs_f64();
        whole.timings.wire_s = whole.seconds;
        #[expect(clippy::cast_precision_loss, reason = "a rate; 2^53 bytes are exact")]
        let bytes = whole.bytes as f64;
        whole.gb_per_s = if whole.seconds > 0.0 { bytes / whole.seconds / 1e9 } else { 0.0 };
    }
    Some(whole)
}

fn add(whole: &mut Receipt, receipt: Receipt) {
    whole.bytes += receipt.bytes;
    whole.descriptors += receipt.descriptors;
    whole.descriptors_merged += receipt.descriptors_merged;
    whole.staged |= receipt.staged;
    whole.timings.prepare_s += receipt.timings.prepare_s;
    whole.timings.post_s += receipt.timings.post_s;
    whole.violation = whole.violation.take().or(receipt.violation);
    for Rail { name, bytes } in receipt.rails {
        match whole.rails.iter_mut().find(|rail| rail.name == name) {
            Some(rail) => rail.bytes += bytes,
            None => whole.rails.push(Rail { name, bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use towline_wire::receipt::{Evidence, EvidenceClass, Op, RECEIPT_SCHEMA, Timings, TransportKind};

    use super::*;

    fn receipt(rail: &str, bytes: u64) -> Receipt {
        Receipt {
            schema: RECEIPT_SCHEMA,
            transport: TransportKind::Tcp,
            op: Op::Read,
            local_agent: "d".into(),
            remote_agent: "p".into(),
            bytes,
            blocks: 4,
            descriptors: 4,
            descriptors_merged: 2,
            staged: false,
            rails: vec![Rail { name: rail.into(), bytes }],
            seconds: 9.0,
            gb_per_s: 0.0,
            timings: Timings::default(),
            lease: None,
            violation: None,
            evidence: Evidence { class: EvidenceClass::LibraryExact, source: "socket".into() },
            verified_by: "socket".into(),
        }
    }

    fn moved(receipts: Vec<Receipt>) -> Moved {
        Moved { receipts, wall: Duration::from_secs(1) }
    }

    #[test]
    fn bytes_add_up_by_rail_and_blocks_count_once() {
        let parts = vec![moved(vec![receipt("a", 5), receipt("b", 6)]), moved(vec![receipt("a", 7)])];
        let whole = join(parts, 4).unwrap();
        let rails: Vec<_> = whole.rails.iter().map(|rail| (rail.name.as_str(), rail.bytes)).collect();
        assert_eq!((whole.bytes, whole.blocks, whole.descriptors), (18, 4, 12));
        assert_eq!((rails, whole.seconds), (vec![("a", 12), ("b", 6)], 2.0));
    }

    #[test]
    fn a_single_transfer_keeps_its_receipt() {
        assert_eq!(join(vec![moved(vec![receipt("a", 5)])], 99), Some(receipt("a", 5)));
        assert_eq!(join(vec![], 0), None);
    }
}
