//! KV that is lent before it is computed: layers are pulled as they come to be, and the answer is the same.
//!
//! No test here asks how long anything takes. The prefill engine stands still behind a gate, with some layers stored and
//! the others not, until decode has told what it received.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use towline_wire::handoff::HandoffError;
use towline_wire::kv_params::RemoteKv;
use towline_wire::receipt::TransportKind;
use towline_wire::ticket::Ticket;
use towline_worker::engine::{Event, Job, JobHandle, Start};
use towline_worker::handoff::{GrantError, PullError, Pulled};
use towline_worker::pool::KvPool;

use super::gate::{Gate, Gated, PATIENCE};
use super::{BLOCK_TOKENS, BOTH, Setup, Side, job, prompt, whole};

const ANSWER: u32 = 24;
/// Layers of the tiny model.
const LAYERS: u32 = 3;

/// A prefill side whose engine stops after each layer.
fn gated(transport: TransportKind) -> (Side, Arc<Gate>) {
    let gate = Arc::<Gate>::default();
    let behind = Arc::clone(&gate);
    let side = Side::start_with(&Setup::new("prefill", transport), |model| Gated { model, gate: behind });
    (side, gate)
}

/// Submits the prompt and waits for its ticket, which comes before anything is computed.
async fn lend(prefill: &Side, prompt: &[u32]) -> (JobHandle, RemoteKv) {
    let (progress, ticket) = prefill.handoff.lend_early("request", prompt);
    let asked = Job { progress: Some(progress), ..job(prompt, 1, Start::Fresh) };
    let handle = prefill.engine.submit(asked).unwrap();
    let remote = tokio::time::timeout(PATIENCE, ticket.ready()).await.unwrap().unwrap();
    (handle, remote)
}

fn ticket(remote: &RemoteKv) -> &Ticket {
    &remote.towline.as_ref().unwrap().ticket
}

/// Pulls while `direct` hears of each part and moves the gate.
async fn pull_while<F: Future<Output = ()>>(
    decode: &Side,
    (remote, prompt): (&RemoteKv, &[u32]),
    direct: impl FnOnce(mpsc::UnboundedReceiver<u32>) -> F,
) -> Result<Pulled, PullError> {
    let (tell, parts) = mpsc::unbounded_channel();
    let pull = async move {
        // Goes with the pull, so that who waits for another part hears of its end.
        let mut arrived = move |part| tell.send(part).unwrap();
        decode.handoff.pull_parts(remote, prompt, "", &mut arrived).await
    };
    let both = async { tokio::join!(pull, direct(parts)).0 };
    tokio::time::timeout(PATIENCE, both).await.expect("a pull that ends")
}

/// Bytes of layers `layers` of block `block`.
fn layers_of(pool: &KvPool, block: u32, layers: std::ops::Range<u64>) -> Vec<u8> {
    let geometry = pool.geometry();
    let layer = geometry.block_bytes / u64::from(LAYERS);
    let mut bytes = vec![0; usize::try_from(layer * (layers.end - layers.start)).unwrap()];
    let at = u64::from(block) * geometry.block_bytes + layers.start * layer;
    pool.memory().read_into(at, &mut bytes).unwrap();
    bytes
}

/// The prompt's blocks in both pools: a fresh pool hands them out in order.
fn pairs(remote: &RemoteKv) -> Vec<(u32, u32)> {
    (0..).zip(remote.remote_block_ids[0].iter().copied()).collect()
}

#[tokio::test]
async fn layer_zero_is_pulled_while_layer_one_is_still_being_computed() {
    for transport in BOTH {
        let (prefill, gate) = gated(transport);
        let decode = Side::start(&Setup::new("decode", transport));
        let alone = Side::start(&Setup::new("alone", transport));
        let prompt = prompt(100, 1);
        let (mut handle, remote) = lend(&prefill, &prompt).await;
        assert_eq!((ticket(&remote).part_layers.count(), ticket(&remote).ranks[0].parts_ready), (LAYERS, 0));
        let direct = async |mut parts: mpsc::UnboundedReceiver<u32>| {
            for layer in 0..LAYERS {
                assert_eq!(parts.recv().await, Some(layer));
                assert_eq!(gate.stored(), layer as usize + 1, "the layers after it are not computed");
                let here = u64::from(layer) + 1;
                for (ours, theirs) in pairs(&remote) {
                    let arrived = layers_of(&decode.pool, ours, 0..here);
                    assert_eq!(arrived, layers_of(&prefill.pool, theirs, 0..here));
                    let rest = layers_of(&decode.pool, ours, here..u64::from(LAYERS));
                    assert!(rest.iter().all(|byte| *byte == 0), "more than layer {layer} was pulled");
                }
                gate.allow(layer as usize + 1);
            }
        };
        let pulled = pull_while(&decode, (&remote, &prompt), direct).await.unwrap();
        assert_eq!((pulled.tokens, pulled.receipt.blocks), (6 * BLOCK_TOKENS, 6));
        assert_eq!(pulled.receipt.bytes, 6 * decode.pool.geometry().block_bytes);
        let start = Start::Loaded { blocks: pulled.blocks.share(), tokens: pulled.tokens };
        let (answer, finished) = decode.run(job(&prompt, ANSWER, start)).await;
        assert_eq!(finished.computed_prompt_tokens, 100 - pulled.tokens);
        assert_eq!(answer, alone.aggregated(&prompt, ANSWER).await, "{transport}");
        while !matches!(handle.next().await, Some(Event::Finished(_)) | None) {}
        drop(pulled);
        whole(&prefill.pool).await;
        whole(&decode.pool).await;
        assert_eq!(prefill.handoff.leases_held(), 0);
    }
}

#[tokio::test]
async fn a_short_lease_lasts_as_long_as_decode_waits_for_layers() {
    let gate = Arc::<Gate>::default();
    let behind = Arc::clone(&gate);
    let setup = Setup { lease_ttl: Duration::from_secs(3), ..Setup::new("prefill", TransportKind::Tcp) };
    let prefill = Side::start_with(&setup, |model| Gated { model, gate: behind });
    let decode = Side::start(&Setup::new("decode", TransportKind::Tcp));
    let prompt = prompt(100, 1);
    let (_handle, remote) = lend(&prefill, &prompt).await;
    let direct = async |mut parts: mpsc::UnboundedReceiver<u32>| {
        assert_eq!(parts.recv().await, Some(0));
        tokio::time::sleep(2 * setup.lease_ttl).await;
        gate.allow(usize::MAX);
        while parts.recv().await.is_some() {}
    };
    pull_while(&decode, (&remote, &prompt), direct).await.unwrap();
}

#[tokio::test]
async fn for_prompts_of_several_steps_and_around_a_block_the_answer_is_the_same() {
    let alone = Side::start(&Setup::new("alone", TransportKind::Shm));
    for transport in BOTH {
        let (prefill, gate) = gated(transport);
        gate.allow(usize::MAX);
        let decode = Side::start(&Setup::new("decode", transport));
        for (seed, len) in (0..).zip([1, 16, 17, 33, 700]) {
            let prompt = prompt(len, seed);
            let (_handle, remote) = lend(&prefill, &prompt).await;
            let (answer, ..) = decode.decode(&remote, &prompt, ANSWER).await;
            assert_eq!(answer, alone.aggregated(&prompt, ANSWER).await, "{len} tokens over {transport}");
        }
    }
}

#[tokio::test]
async fn an_early_pull_moves_only_what_decode_lacks() {
    let (prefill, gate) = gated(TransportKind::Tcp);
    gate.allow(usize::MAX);
    let decode = Side::start(&Setup::new("decode", TransportKind::Tcp));
    let long = prompt(100, 1);
    let (_first, remote) = lend(&prefill, &long).await;
    decode.pull(&remote, &long).await.unwrap();
    let longer: Vec<u32> = long[..64].iter().copied().chain(prompt(50, 9)).collect();
    let (_second, remote) = lend(&prefill, &longer).await;
    let pulled = decode.pull(&remote, &longer).await.unwrap();
    assert_eq!((pulled.receipt.blocks, pulled.cached_tokens), (3, 64));
    assert_eq!(pulled.receipt.bytes, 3 * decode.pool.geometry().block_bytes);
}

#[tokio::test]
async fn a_prefill_engine_that_dies_between_layers_is_an_error_and_nothing_is_kept() {
    for transport in BOTH {
        let (prefill, gate) = gated(transport);
        let decode = Side::start(&Setup::new("decode", transport));
        let prompt = prompt(100, 1);
        let (_handle, remote) = lend(&prefill, &prompt).await;
        let direct = async |mut parts: mpsc::UnboundedReceiver<u32>| {
            assert_eq!(parts.recv().await, Some(0));
            gate.break_down();
            assert_eq!(parts.recv().await, None, "no other part is taken for good");
        };
        let outcome = pull_while(&decode, (&remote, &prompt), direct).await;
        let expired = matches!(
            outcome,
            Err(PullError::Handoff(HandoffError::Expired { .. } | HandoffError::LeaseOver))
        );
        assert!(expired, "{transport}: {outcome:?}");
        assert_eq!((decode.pool.stats().cached, prefill.handoff.leases_held()), (0, 0));
        whole(&decode.pool).await;
        whole(&prefill.pool).await;
    }
}

#[tokio::test]
async fn a_prefill_worker_that_is_gone_between_layers_is_an_error_in_time() {
    for transport in BOTH {
        let (prefill, gate) = gated(transport);
        let decode = Side::start(&Setup::new("decode", transport));
        let prompt = prompt(100, 1);
        let (_handle, remote) = lend(&prefill, &prompt).await;
        let Side { engine, handoff, .. } = prefill;
        let direct = async |mut parts: mpsc::UnboundedReceiver<u32>| {
            assert_eq!(parts.recv().await, Some(0));
            drop(handoff);
            assert_eq!(parts.recv().await, None, "no other part is taken for good");
        };
        let outcome = pull_while(&decode, (&remote, &prompt), direct).await;
        let Err(PullError::Handoff(error)) = outcome else { panic!("{transport}: {outcome:?}") };
        assert!(
            matches!(
                error,
                HandoffError::Expired { .. } | HandoffError::LeaseOver | HandoffError::Unreachable { .. }
            ),
            "{transport}: {error}"
        );
        assert_eq!(decode.pool.stats().cached, 0);
        whole(&decode.pool).await;
        gate.allow(usize::MAX);
        drop(engine);
    }
}

#[tokio::test]
async fn a_pull_that_is_cancelled_between_layers_gives_everything_back() {
    let (prefill, gate) = gated(TransportKind::Shm);
    let decode = Side::start(&Setup::new("decode", TransportKind::Shm));
    let prompt = prompt(100, 1);
    let (mut handle, remote) = lend(&prefill, &prompt).await;
    {
        let (tell, mut parts) = mpsc::unbounded_channel();
        let mut arrived = |part| tell.send(part).unwrap();
        let pull = decode.handoff.pull_parts(&remote, &prompt, "", &mut arrived);
        tokio::select! {
            _ = pull => panic!("two layers are not computed yet"),
            part = parts.recv() => assert_eq!(part, Some(0)),
        }
    }
    whole(&decode.pool).await;
    gate.allow(usize::MAX);
    // The lease is over; the engine computes on undisturbed.
    while !matches!(handle.next().await, Some(Event::Finished(_))) {}
    whole(&prefill.pool).await;
    assert_eq!(prefill.handoff.leases_held(), 0);
}

#[tokio::test]
async fn a_job_that_ends_before_it_begins_has_no_ticket() {
    let prefill = Side::start(&Setup::new("prefill", TransportKind::Shm));
    let (progress, ticket) = prefill.handoff.lend_early("request", &[1, 2, 3]);
    assert!(prefill.engine.submit(Job { progress: Some(progress), ..job(&[], 1, Start::Fresh) }).is_err());
    assert!(matches!(ticket.ready().await, Err(GrantError::NotStarted)));
}
