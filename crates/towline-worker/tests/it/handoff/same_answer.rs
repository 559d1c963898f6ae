//! The answer through a handoff equals the answer without one, token for token.

use towline_wire::receipt::TransportKind;
use towline_worker::pool::{BlockOrder, PrefixCache};
use towline_worker::testing::TinyModel;

use super::{BOTH, Setup, Side, pair, prompt};

const ANSWER: u32 = 24;

async fn check(prefill: &Side, decode: &Side, alone: &Side, prompt: &[u32]) {
    let expected = alone.aggregated(prompt, ANSWER).await;
    let remote = prefill.prefill(prompt).await;
    let (answer, ..) = decode.decode(&remote, prompt, ANSWER).await;
    assert_eq!(answer, expected, "prompt of {} tokens", prompt.len());
}

#[tokio::test]
async fn for_prompts_of_every_length_around_a_block_over_both_transports() {
    let alone = Side::start(&Setup::new("alone", TransportKind::Tcp));
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        for (seed, len) in (0..).zip([1, 2, 15, 16, 17, 31, 32, 33, 100, 640]) {
            check(&prefill, &decode, &alone, &prompt(len, seed)).await;
        }
    }
}

#[tokio::test]
async fn for_two_thousand_tokens_over_both_transports() {
    let long = TinyModel { context: 4096, ..TinyModel::default() };
    let start = |name, transport| Side::start(&Setup { tiny: long.clone(), ..Setup::new(name, transport) });
    let alone = start("alone", TransportKind::Tcp);
    for transport in BOTH {
        let (prefill, decode) = (start("prefill", transport), start("decode", transport));
        check(&prefill, &decode, &alone, &prompt(2000, 7)).await;
    }
}

#[tokio::test]
async fn with_and_without_prefix_caches_and_with_shuffled_blocks_and_other_thread_counts() {
    let alone = Side::start(&Setup::new("alone", TransportKind::Tcp));
    let usual = |name| Setup::new(name, TransportKind::Shm);
    let variants = [
        Setup { prefix_cache: PrefixCache::Off, ..usual("decode") },
        Setup { order: BlockOrder::Shuffled(5), ..usual("decode") },
        Setup { threads: 3, ..usual("decode") },
        Setup {
            threads: 2,
            prefix_cache: PrefixCache::Off,
            order: BlockOrder::Shuffled(9),
            ..usual("decode")
        },
    ];
    for variant in variants {
        let prefill =
            Side::start(&Setup { name: "prefill", order: BlockOrder::Shuffled(1), ..variant.clone() });
        let decode = Side::start(&variant);
        for (len, seed) in [(70, 1), (70, 1), (90, 1), (200, 2)] {
            check(&prefill, &decode, &alone, &prompt(len, seed)).await;
        }
    }
}

#[tokio::test]
async fn for_batches_of_one_to_eight() {
    let alone = Side::start(&Setup::new("alone", TransportKind::Tcp));
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        for batch in [1, 2, 3, 5, 8] {
            let prompts: Vec<_> = (0..batch).map(|i| prompt(20 + 23 * i as usize, 10 * batch + i)).collect();
            let handoffs = prompts.iter().map(|prompt| async {
                let remote = prefill.prefill(prompt).await;
                decode.decode(&remote, prompt, ANSWER).await.0
            });
            let answers = futures_util::future::join_all(handoffs).await;
            for (prompt, answer) in prompts.iter().zip(answers) {
                assert_eq!(answer, alone.aggregated(prompt, ANSWER).await, "batch of {batch}");
            }
        }
    }
}
