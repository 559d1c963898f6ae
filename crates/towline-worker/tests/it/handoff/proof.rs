//! The handoff is real: what was computed where, what the receipt claims, and what a flipped byte does.

use towline_wire::digest::DigestMode;
use towline_wire::handoff::HandoffError;
use towline_wire::receipt::{EvidenceClass, TransportKind};
use towline_worker::handoff::PullError;

use super::{BLOCK_TOKENS, BOTH, Setup, Side, pair, prompt, whole};

#[tokio::test]
async fn decode_computes_at_most_one_block_of_the_prompt() {
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        for (seed, len) in (0..).zip([1, 16, 17, 48, 100, 333]) {
            let prompt = prompt(len, seed);
            let remote = prefill.prefill(&prompt).await;
            let (_, finished, pulled) = decode.decode(&remote, &prompt, 4).await;
            assert!(
                finished.computed_prompt_tokens <= BLOCK_TOKENS,
                "{} of {len}",
                finished.computed_prompt_tokens
            );
            assert_eq!(finished.computed_prompt_tokens, len - pulled.tokens);
        }
    }
}

#[tokio::test]
async fn receipt_bytes_equal_the_blocks_and_the_bytes_counted_at_the_transport() {
    for (transport, source) in [(TransportKind::Shm, "mapping"), (TransportKind::Tcp, "socket")] {
        let (prefill, decode) = pair(transport);
        let prompt = prompt(200, 1);
        let remote = prefill.prefill(&prompt).await;
        let receipt = decode.pull(&remote, &prompt).await.unwrap().receipt;
        let blocks = u64::try_from(remote.remote_block_ids[0].len()).unwrap();
        assert_eq!((receipt.transport, receipt.blocks, blocks), (transport, 12, 12));
        assert_eq!(receipt.bytes, blocks * decode.pool.geometry().block_bytes);
        assert_eq!(receipt.rails.iter().map(|rail| rail.bytes).sum::<u64>(), receipt.bytes);
        assert_eq!(
            (receipt.evidence.class, receipt.verified_by.as_str()),
            (EvidenceClass::LibraryExact, source)
        );
        assert_eq!(receipt.lease, Some(remote.towline.unwrap().ticket.ranks[0].lease));
        assert!(receipt.seconds > 0.0 && receipt.gb_per_s > 0.0 && receipt.timings.verify_s > 0.0);
    }
}

#[tokio::test]
async fn a_prefix_that_decode_has_is_not_pulled_again() {
    let (prefill, decode) = pair(TransportKind::Shm);
    let long = prompt(100, 1);
    let first = decode.pull(&prefill.prefill(&long).await, &long).await.unwrap();
    assert_eq!((first.receipt.blocks, first.cached_tokens), (6, 0));
    let longer: Vec<u32> = long[..64].iter().copied().chain(prompt(50, 9)).collect();
    let second = decode.pull(&prefill.prefill(&longer).await, &longer).await.unwrap();
    assert_eq!(
        (second.receipt.blocks, second.cached_tokens),
        (3, 64),
        "114 tokens: 7 blocks, 4 of them known"
    );
}

#[tokio::test]
async fn releasing_gives_prefill_its_blocks_back() {
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        let prompt = prompt(100, 1);
        let remote = prefill.prefill(&prompt).await;
        assert_eq!((prefill.pool.stats().used, prefill.handoff.leases_held()), (6, 1));
        drop(decode.decode(&remote, &prompt, 4).await);
        whole(&prefill.pool).await;
        whole(&decode.pool).await;
        assert_eq!(prefill.handoff.leases_held(), 0);
    }
}

/// Flips one bit in the middle of prefill's copy of the prompt's third block.
fn corrupt(prefill: &Side, block: u32) {
    let geometry = prefill.pool.geometry();
    let at = u64::from(block) * geometry.block_bytes + geometry.block_bytes / 2;
    let mut byte = [0];
    prefill.pool.memory().read_into(at, &mut byte).unwrap();
    prefill.pool.memory().write_from(at, &[byte[0] ^ 0x10]).unwrap();
}

#[tokio::test]
async fn a_flipped_bit_is_a_digest_mismatch_and_decode_keeps_nothing() {
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        let prompt = prompt(100, 1);
        let remote = prefill.prefill(&prompt).await;
        corrupt(&prefill, remote.remote_block_ids[0][2]);
        let error = decode.pull(&remote, &prompt).await.unwrap_err();
        let PullError::Handoff(HandoffError::DigestMismatch(mismatch)) = error else { panic!("{error}") };
        assert_eq!(mismatch.position, 2);
        whole(&decode.pool).await;
        assert_eq!(decode.pool.stats().cached, 0, "nothing of a bad pull may be found later");
        whole(&prefill.pool).await;
    }
}

#[tokio::test]
async fn without_digests_a_flipped_bit_changes_the_logits() {
    let setup = |name| Setup { digest: DigestMode::Off, ..Setup::new(name, TransportKind::Tcp) };
    let (prefill, decode) = (Side::start(&setup("prefill")), Side::start(&setup("decode")));
    let alone = Side::start(&setup("alone"));
    let (mut changed, tries) = (0, 8);
    for seed in 0..tries {
        let prompt = prompt(100, seed);
        let remote = prefill.prefill(&prompt).await;
        for block in &remote.remote_block_ids[0] {
            for _ in 0..1 {
                corrupt_exponent(&prefill, *block);
            }
        }
        let (answer, ..) = decode.decode(&remote, &prompt, 16).await;
        changed += u32::from(answer != alone.aggregated(&prompt, 16).await);
    }
    assert!(changed > 0, "decode does not use what it pulled");
}

/// Flips the high exponent bit of every f16 in the first row of a block: a change that greedy answers show.
fn corrupt_exponent(prefill: &Side, block: u32) {
    let at = u64::from(block) * prefill.pool.geometry().block_bytes;
    let mut row = [0; 64];
    prefill.pool.memory().read_into(at, &mut row).unwrap();
    row.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x20);
    prefill.pool.memory().write_from(at, &row).unwrap();
}
