//! Many threads that read, cancel, drop and run out of time at random: whatever they do, data that is reported is
//! right, every hold comes back, and nothing is left in flight.

use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use towline_fabric::{Peer, RegionOptions, TransferError};
use towline_wire::id::RegionId;
use towline_wire::receipt::Op;

use crate::support::*;

const REGION: u64 = 6 << 20;
const PAGE: u64 = 64 << 10;
const ROUNDS: usize = 50;

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn whatever_callers_do_holds_come_back_and_reported_data_is_right() {
    let seed = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() & 0xffff_ffff)
        .unwrap()
        | 1;
    println!("seed {seed}");
    for case in CASES {
        let kind = case.kind;
        let pair = Pair::of(case, REGION, RegionOptions::default());
        for page in 0..REGION / PAGE {
            pair.region.memory().write_from(page * PAGE, &page.to_le_bytes()).unwrap();
        }
        let second = wait(pair.reader.connect(pair.owner.address(), only(kind))).unwrap();
        let region = pair.region.id();
        let holds: Vec<Weak<()>> = std::thread::scope(|scope| {
            let peers = [&pair.peer, &second, &pair.peer, &second];
            let act = |(index, peer)| scope.spawn(move || play(peer, region, Dice(seed + index)));
            let threads: Vec<_> = (0..).zip(peers).map(act).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        eventually("every hold is back", || holds.iter().all(|hold| hold.upgrade().is_none()));
        eventually("nothing is in flight", || pair.reader.stats().transfers == 0);
        assert!(pair.peer.is_open() && second.is_open(), "no path was harmed");
        let stats = pair.reader.stats();
        assert_eq!(stats.transfers_done + stats.transfers_failed, holds.len() as u64);
        assert_eq!(stats.forced_closes, 0);
    }
}

#[test]
fn a_connection_cut_at_any_moment_ends_its_transfers_and_gives_holds_back() {
    let mut dice = Dice(0x5eed);
    for (round, case) in CASES.iter().cycle().enumerate().take(48) {
        let Pair { peer, region, owner, reader, .. } = Pair::of(*case, REGION, RegionOptions::default());
        let id = region.id();
        let (mut owner, mut reader) = (Some((owner, region)), Some(reader));
        let holds: Vec<Weak<()>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| until_cut(&peer, id))).collect();
            pause(Duration::from_micros(dice.below(20_000)));
            match round / 4 % 3 {
                0 => peer.close(),
                1 => drop(owner.take()),
                _ => drop(reader.take()),
            }
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        eventually("every hold is back", || holds.iter().all(|hold| hold.upgrade().is_none()));
    }
}

/// Posts reads until one fails; it must be for the connection.
fn until_cut(peer: &Peer, region: RegionId) -> Vec<Weak<()>> {
    let mut holds = Vec::new();
    let local = memory(REGION);
    loop {
        let (hold, held) = hold();
        holds.push(held);
        let mut request = request(Op::Read, &local, region, (blocks(REGION, [0]), blocks(REGION, [0])));
        request.hold = Some(hold);
        let posted = peer.transfer(request);
        let outcome = posted.and_then(|mut transfer| transfer.wait(PATIENCE).expect("an outcome in time"));
        match outcome {
            Ok(receipt) => assert_eq!(receipt.bytes, REGION),
            Err(TransferError::Unreachable { .. } | TransferError::Closed { .. }) => return holds,
            Err(error) => panic!("{error}"),
        }
    }
}

fn play(peer: &Peer, region: RegionId, mut dice: Dice) -> Vec<Weak<()>> {
    let mut holds = Vec::new();
    for _ in 0..ROUNDS {
        let count = 1 + dice.below(REGION / PAGE - 1);
        let indices: Vec<u32> =
            (0..count).map(|_| u32::try_from(dice.below(REGION / PAGE)).unwrap()).collect();
        let local = memory(count * PAGE);
        let list = blocks(PAGE, 0..u32::try_from(count).unwrap());
        let (hold, held) = hold();
        holds.push(held);
        let mut request = request(Op::Read, &local, region, (list, blocks(PAGE, indices.clone())));
        request.hold = Some(hold);
        if dice.below(4) == 0 {
            request.deadline = Duration::from_micros(dice.below(5000));
        }
        let mut transfer = peer.transfer(request).unwrap();
        match dice.below(4) {
            0 => continue,
            1 => transfer.cancel(),
            2 => drop(transfer.wait(Duration::from_micros(dice.below(2000)))),
            _ => {}
        }
        match transfer.wait(PATIENCE) {
            Some(Ok(receipt)) => {
                assert_eq!(receipt.bytes, count * PAGE);
                check(&local, &indices);
            }
            Some(Err(TransferError::Cancelled | TransferError::Stalled { .. })) | None => {}
            Some(Err(error)) => panic!("{error}"),
        }
    }
    holds
}

fn check(local: &Arc<towline_fabric::Memory>, indices: &[u32]) {
    for (place, index) in (0u64..).zip(indices) {
        let mut word = [0; 8];
        local.read_into(place * PAGE, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), u64::from(*index));
    }
}
