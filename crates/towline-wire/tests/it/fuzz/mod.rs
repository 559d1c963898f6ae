//! Every decoder meets every input: truncated, flipped, spliced and random, by a seeded generator, on stable Rust.
//!
//! The same harness functions run under cargo-fuzz (`crates/towline-wire/fuzz`), which looks further than any list of
//! mutations; this is the form that CI runs. A failure prints the input in hexadecimal.

mod cargo_fuzz;
mod harness;
mod seeds;

use std::panic::catch_unwind;

use crate::number;
use crate::random::Random;

type Harness = fn(&[u8]) -> bool;

/// A decoder under test: its name in `crates/towline-wire/fuzz`, what must hold, and valid encodings.
struct Target {
    name: &'static str,
    harness: Harness,
    seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(name: &'static str, harness: Harness, seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, harness, seeds }
}

/// All of them, by name.
const TARGETS: &[Target] = &[
    target("agent_card", harness::agent_card, seeds::agent_cards),
    target("carried_card", harness::carried_card, seeds::carried_cards),
    target("challenge", harness::challenge, seeds::challenges),
    target("control", harness::control, seeds::controls),
    target("digests", harness::digests, seeds::digests),
    target("engine_card", harness::engine_card, seeds::engine_cards),
    target("fence_slot", harness::fence_slot, seeds::fence_slots),
    target("frame", harness::frame, seeds::frames),
    target("handshake", harness::handshake, seeds::handshakes),
    target("layout", harness::layout, seeds::layouts),
    target("prefill_params", harness::prefill_params, seeds::prefill_params),
    target("remote_kv", harness::remote_kv, seeds::remote_kvs),
    target("reply", harness::reply, seeds::replies),
    target("request", harness::request, seeds::requests),
    target("ticket", harness::ticket, seeds::tickets),
];

/// Inputs that are random, or seeds with several mutations, half and half; `TOWLINE_INPUTS` asks for more.
const RANDOM_INPUTS: u64 = 20_000;
/// Most truncations, and most flips, tried of one seed: more are sampled. Miri takes milliseconds for each.
const SAMPLES: usize = if cfg!(miri) { 8 } else { 1_500 };
/// Longest random input in bytes.
const LENGTH_MAX: u64 = 300;

/// One harness at work.
struct Campaign {
    harness: Harness,
    seeds: Vec<Vec<u8>>,
    random: Random,
}

impl Campaign {
    fn meet(&self, what: &str, input: &[u8]) -> bool {
        let met = catch_unwind(|| (self.harness)(input));
        met.unwrap_or_else(|_| {
            let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            panic!("{what}, {} bytes: {hex}\nas text: {}", input.len(), String::from_utf8_lossy(input))
        })
    }

    /// All of `0..len`, or a sample of them.
    fn places(&mut self, len: usize) -> Vec<usize> {
        if len <= SAMPLES {
            return (0..len).collect();
        }
        (0..SAMPLES).map(|_| self.random.index(len)).collect()
    }

    fn truncate_and_flip(&mut self, seed: &[u8]) {
        for cut in self.places(seed.len()) {
            self.meet("truncated", &seed[..cut]);
        }
        for at in self.places(seed.len()) {
            for mask in [1 << self.random.index(8), 0xff, self.random.byte() | 1] {
                let mut flipped = seed.to_vec();
                flipped[at] ^= mask;
                self.meet("flipped", &flipped);
            }
        }
    }

    fn splice(&mut self) -> Vec<u8> {
        let (a, b) = (self.random.index(self.seeds.len()), self.random.index(self.seeds.len()));
        let (head, tail) = (&self.seeds[a], &self.seeds[b]);
        let cut = self.random.index(head.len() + 1);
        let from = self.random.index(tail.len() + 1);
        [&head[..cut], &tail[from..]].concat()
    }

    /// Some mutations of a seed: bytes changed, removed, doubled, a length blown up.
    fn mutate(&mut self) -> Vec<u8> {
        let mut input = if self.random.chance(300) {
            self.splice()
        } else {
            let at = self.random.index(self.seeds.len());
            self.seeds[at].clone()
        };
        for _ in 0..self.random.within(1, 4) {
            if input.is_empty() {
                break;
            }
            let at = self.random.index(input.len());
            match self.random.within(0, 6) {
                0 => drop(input.remove(at)),
                1 => input.insert(at, self.random.byte()),
                2 => {
                    input[at] = [0, 1, 0x7f, 0x80, 0xff, b'9', b'"', b'-', b'+', b'e'][self.random.index(10)]
                }
                3 => {
                    let end = (at + self.random.index(9)).min(input.len());
                    let piece = input[at..end].to_vec();
                    input.splice(at..at, piece);
                }
                4 => {
                    let end = (at + 8).min(input.len());
                    input[at..end].fill(if self.random.chance(500) { 0xff } else { b'9' });
                }
                5 => input[at] = input[self.random.index(input.len())],
                _ => input[at] = self.random.byte(),
            }
        }
        input
    }

    fn noise(&mut self) -> Vec<u8> {
        (0..self.random.within(0, LENGTH_MAX)).map(|_| self.random.byte()).collect()
    }
}

/// Seeds are taken; nothing that is made of them breaks a promise.
fn assert_meets_every_input(name: &str) {
    let Target { harness, seeds, .. } = *TARGETS.iter().find(|target| target.name == name).unwrap();
    let mut campaign = Campaign { harness, seeds: seeds(), random: Random::new(0x70_771e) };
    for seed in &seeds() {
        assert!(campaign.meet("a valid encoding", seed), "refused: {}", String::from_utf8_lossy(seed));
        campaign.truncate_and_flip(seed);
    }
    let mut taken = 0;
    let pairs = number("TOWLINE_INPUTS").unwrap_or(RANDOM_INPUTS) / 2;
    for _ in 0..pairs {
        let (mutant, noise) = (campaign.mutate(), campaign.noise());
        taken += usize::from(campaign.meet("mutated", &mutant));
        campaign.meet("random", &noise);
    }
    println!("{name}: {taken} of {pairs} mutated inputs were taken");
}

#[test]
fn agent_cards_meet_every_input() {
    assert_meets_every_input("agent_card");
}

#[test]
fn carried_cards_meet_every_input() {
    assert_meets_every_input("carried_card");
}

#[test]
fn engine_cards_meet_every_input() {
    assert_meets_every_input("engine_card");
}

#[test]
fn control_messages_meet_every_input() {
    assert_meets_every_input("control");
}

#[test]
fn frames_meet_every_input() {
    assert_meets_every_input("frame");
}

#[test]
fn requests_and_replies_meet_every_input() {
    assert_meets_every_input("request");
    assert_meets_every_input("reply");
}

#[test]
fn fence_slots_meet_every_input() {
    assert_meets_every_input("fence_slot");
}

#[test]
fn handshakes_meet_every_input() {
    assert_meets_every_input("handshake");
    assert_meets_every_input("challenge");
}

#[test]
fn tickets_meet_every_input() {
    assert_meets_every_input("ticket");
}

#[test]
fn a_ticket_whose_bytes_cannot_be_counted_is_refused() {
    assert!(seeds::impossible_tickets().iter().all(|ticket| !harness::ticket(ticket)));
}

#[test]
fn kv_transfer_params_meet_every_input() {
    assert_meets_every_input("remote_kv");
    assert_meets_every_input("prefill_params");
}

#[test]
fn digests_meet_every_input() {
    assert_meets_every_input("digests");
}

#[test]
fn layouts_meet_every_input() {
    assert_meets_every_input("layout");
}
