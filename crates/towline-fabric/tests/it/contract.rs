//! A pair that turns out slower than its contract: refused, or marked.

use towline_fabric::{ConnectError, ConnectOptions, RegionOptions, TransferError};
use towline_wire::contract::{Contract, OnViolation, Requirement};
use towline_wire::receipt::Op;

use crate::support::*;

const BYTES: u64 = 8 << 20;

/// No memory is as fast.
fn absurd(on_violation: OnViolation) -> Contract {
    Contract { min_gb_per_s: 1e9, on_violation, ..Contract::default() }
}

#[test]
fn a_pair_that_is_too_slow_is_refused_and_stays_so_for_a_while() {
    for kind in KINDS {
        let (owner, _) = start(config("owner"));
        let region = owner.register(memory(BYTES), RegionOptions::default()).unwrap();
        let (reader, _) = start(config("reader"));
        let strict = ConnectOptions { contract: absurd(OnViolation::Refuse), ..only(kind) };
        let peer = wait(reader.connect(owner.address(), strict.clone())).unwrap();
        let local = memory(BYTES);
        let pull = || {
            let list = || blocks(BYTES, [0]);
            peer.transfer(request(Op::Read, &local, region.id(), (list(), list())))
                .and_then(|mut transfer| transfer.wait(PATIENCE).unwrap())
        };
        for _ in 0..3 {
            assert_eq!(pull().unwrap().bytes, BYTES);
        }
        let refused = pull().unwrap_err();
        assert!(matches!(refused, TransferError::ContractViolation(_)), "{kind}: {refused}");
        assert!(!peer.is_open() && peer.violation().is_some());
        assert_eq!(reader.stats().contract_violations, 1);
        let again = wait(reader.connect(owner.address(), strict)).unwrap_err();
        assert!(matches!(again, ConnectError::ContractViolation(_)), "{kind}: {again}");
        assert!(wait(reader.connect(owner.address(), only(kind))).is_ok(), "who asks for less is served");
    }
}

#[test]
fn under_an_alarm_a_slow_pair_goes_on_and_each_receipt_says_so() {
    for kind in KINDS {
        let (owner, _) = start(config("owner"));
        let region = owner.register(memory(BYTES), RegionOptions::default()).unwrap();
        let (reader, _) = start(config("reader"));
        let lenient = ConnectOptions { contract: absurd(OnViolation::Alarm), ..only(kind) };
        let peer = wait(reader.connect(owner.address(), lenient)).unwrap();
        let local = memory(BYTES);
        let marked: Vec<bool> = (0..5)
            .map(|_| {
                let list = || blocks(BYTES, [0]);
                let mut transfer =
                    peer.transfer(request(Op::Read, &local, region.id(), (list(), list()))).unwrap();
                transfer.wait(PATIENCE).unwrap().unwrap().violation.is_some()
            })
            .collect();
        assert_eq!(marked, [false, false, true, true, true], "{kind}");
        assert!(peer.is_open());
        assert_eq!(reader.stats().contract_violations, 1, "it began once");
        let totals = peer.totals();
        assert_eq!((totals.transfers, totals.failed, totals.bytes_read), (5, 0, 5 * BYTES));
        assert_eq!(totals.rails.iter().map(|rail| rail.bytes).sum::<u64>(), 5 * BYTES);
        assert!(!totals.busy.is_zero());
    }
}

/// No memory of a device can be made or wrapped here, so what is left to refuse is the path to it.
#[test]
fn the_built_in_transports_reach_no_device_and_say_so() {
    let (owner, _) = start(config("owner"));
    let (reader, _) = start(config("reader"));
    for kind in KINDS {
        let found = reader.transports().into_iter().find(|status| status.kind == kind).unwrap();
        assert!(!found.available.unwrap().device_memory, "{kind}");
        let contract = Contract { require: Requirement::GpuDirect, ..Contract::default() };
        let refused = wait(reader.connect(owner.address(), ConnectOptions { contract, ..only(kind) }));
        assert!(matches!(refused, Err(ConnectError::ContractViolation(_))), "{kind}: {refused:?}");
    }
}
