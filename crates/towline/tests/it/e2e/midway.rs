//! Workers that die while the KV is half-way: prefill's blocks come back, and the client is told or gets its answer.

use rustix::process::Signal;

use super::cluster::{Cluster, Spec};
use super::fixture::Bench;
use super::http::{Answer, chat, get, metric};
use super::valve::Valve;
use crate::process::eventually;

/// Several blocks of the tiny model.
const LONG: &str =
    "Tell me of the sea, the harbour, the tide and the boats, of ropes and sails and of what the wind does.";
/// Handshake, card, and then some of the KV: a block of the tiny model has 12 KiB.
const HALF_WAY: usize = 20_000;

struct Stalled {
    cluster: Cluster,
    valve: Valve,
}

impl Stalled {
    fn start(bench: &Bench, prefill: &[&str], decode: &[&str]) -> Self {
        let valve = Valve::open(HALF_WAY);
        let (listen, advertise) =
            (format!("--kv-listen={}", valve.upstream), format!("--kv-advertise={}", valve.address));
        let prefill = Spec::with(&[&[listen.as_str(), advertise.as_str()], prefill].concat());
        let decode = Spec::with(&[&["--transport=tcp"], decode].concat());
        Self { cluster: Cluster::start(bench, &prefill, &decode), valve }
    }

    /// Asks, waits until the KV is half-way, lets `strike` happen, and gives the answer.
    fn ask(&self, strike: impl FnOnce(&Cluster)) -> Answer {
        std::thread::scope(|scope| {
            let url = self.cluster.url.as_str();
            let asked = scope.spawn(move || chat(url, LONG));
            self.valve.holds();
            strike(&self.cluster);
            asked.join().unwrap()
        })
    }
}

#[test]
fn killed_decode_frees_prefills_blocks_by_expiry() {
    let bench = Bench::new();
    let stalled = Stalled::start(&bench, &["--lease-seconds=2"], &[]);
    let answer = stalled.ask(|cluster| cluster.decode.signal(Signal::KILL));
    assert!((500..600).contains(&answer.status), "{answer:?}");
    answer.error();
    let prefill = &stalled.cluster.prefill_url;
    eventually("the lease expires", || metric(prefill, "towline_leases_ended_total", "expired") == 1.0);
    eventually("the blocks come back", || metric(prefill, "towline_kv_blocks", "\"used\"") == 0.0);
    assert_eq!(get(prefill, "/health").status, 200);
}

#[test]
fn killed_prefill_is_a_clear_error_under_fail() {
    let bench = Bench::new();
    let stalled = Stalled::start(&bench, &[], &["--on-kv-failure=fail"]);
    let answer = stalled.ask(|cluster| cluster.prefill.signal(Signal::KILL));
    assert!((500..600).contains(&answer.status), "{answer:?}");
    let (message, code) = answer.error();
    assert!(code.contains("kv") && !message.contains("127.0.0.1"), "{answer:?}");
    let decode = &stalled.cluster.decode_url;
    assert_eq!(metric(decode, "towline_generated_tokens_total", ""), 0.0, "half of the KV is never decoded");
    eventually("decode's blocks come back", || metric(decode, "towline_kv_blocks", "\"used\"") == 0.0);
}

#[test]
fn killed_prefill_gives_the_right_answer_under_recompute() {
    let bench = Bench::new();
    let fine = Cluster::start(&bench, &Spec::default(), &Spec::default());
    let expected = chat(&fine.url, LONG);
    let stalled = Stalled::start(&bench, &[], &["--on-kv-failure=recompute"]);
    let answer = stalled.ask(|cluster| cluster.prefill.signal(Signal::KILL));
    assert_eq!(answer.status, 200, "{answer:?}\n{}", stalled.cluster.said());
    assert_eq!(answer.json()["choices"][0]["message"], expected.json()["choices"][0]["message"]);
}
