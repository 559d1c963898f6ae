//! Every way in which a handoff fails: typed, in time, with both pools whole afterwards.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use towline_wire::auth::ClusterKey;
use towline_wire::handoff::HandoffError;
use towline_wire::receipt::TransportKind;
use towline_wire::ticket::TicketError;
use towline_worker::handoff::PullError;
use towline_worker::testing::TinyModel;

use super::{BOTH, Setup, Side, pair, prompt, whole};

async fn refused(decode: &Side, remote: &towline_wire::kv_params::RemoteKv, prompt: &[u32]) -> PullError {
    let error = decode.pull(remote, prompt).await.unwrap_err();
    whole(&decode.pool).await;
    error
}

#[tokio::test]
async fn unsigned_and_altered_parameters_are_refused_before_anything_is_dialled() {
    let (prefill, decode) = pair(TransportKind::Tcp);
    let prompt = prompt(100, 1);
    let remote = prefill.prefill(&prompt).await;
    let mut unsigned = remote.clone();
    unsigned.towline = None;
    assert!(matches!(refused(&decode, &unsigned, &prompt).await, PullError::Unsigned));
    let mut altered = remote.clone();
    // Nothing listens there; a worker that dialled it would say so instead.
    altered.towline.as_mut().unwrap().ticket.ranks[0].address = "127.0.0.1:1".into();
    assert!(matches!(refused(&decode, &altered, &prompt).await, PullError::Ticket(TicketError::Seal)));
    let foreign = remote.towline.clone().unwrap().ticket.seal(&ClusterKey::from_bytes([8; 32]));
    let foreign = towline_wire::kv_params::RemoteKv { towline: Some(foreign), ..remote.clone() };
    assert!(matches!(refused(&decode, &foreign, &prompt).await, PullError::Ticket(TicketError::Seal)));
    // The plain fields beside the ticket are for routers; only the sealed ones count.
    let readdressed = towline_wire::kv_params::RemoteKv { remote_host: "192.0.2.1".into(), ..remote };
    assert!(decode.pull(&readdressed, &prompt).await.is_ok());
}

#[tokio::test]
async fn a_ticket_for_another_prompt_is_refused() {
    let (prefill, decode) = pair(TransportKind::Shm);
    let remote = prefill.prefill(&prompt(100, 1)).await;
    let error = refused(&decode, &remote, &prompt(100, 2)).await;
    assert!(matches!(error, PullError::Handoff(HandoffError::Invalid { .. })), "{error}");
}

#[tokio::test]
async fn other_weights_rope_or_shapes_are_refused_by_name() {
    let usual = TinyModel::default();
    let others = [
        (TinyModel { seed: 2, ..usual.clone() }, "weights"),
        (TinyModel { rope_base: 20_000.0, ..usual.clone() }, "rope"),
        (TinyModel { feed_forward: 128, ..usual.clone() }, "architecture"),
    ];
    for (tiny, field) in others {
        let prefill = Side::start(&Setup { tiny, ..Setup::new("prefill", TransportKind::Tcp) });
        let decode = Side::start(&Setup::new("decode", TransportKind::Tcp));
        let prompt = prompt(100, 1);
        let remote = prefill.prefill(&prompt).await;
        let error = refused(&decode, &remote, &prompt).await;
        let PullError::Handoff(HandoffError::Incompatible { field: found, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(found, field);
    }
}

#[tokio::test]
async fn an_expired_lease_is_never_decoded() {
    for transport in BOTH {
        let ttl = Duration::from_millis(50);
        let prefill = Side::start(&Setup { lease_ttl: ttl, ..Setup::new("prefill", transport) });
        let decode = Side::start(&Setup::new("decode", transport));
        let prompt = prompt(100, 1);
        let remote = prefill.prefill(&prompt).await;
        whole(&prefill.pool).await;
        assert_eq!(prefill.handoff.leases_held(), 0);
        // The blocks are someone else's by now.
        let other = super::prompt(100, 2);
        prefill.aggregated(&other, 4).await;
        let error = refused(&decode, &remote, &prompt).await;
        let expired =
            matches!(&error, PullError::Handoff(HandoffError::Expired { .. } | HandoffError::LeaseOver));
        assert!(expired, "{transport}: {error}");
        assert_eq!(decode.pool.stats().cached, 0);
    }
}

#[tokio::test]
async fn a_prefill_that_is_gone_is_an_error_within_the_deadline() {
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        let prompt = prompt(100, 1);
        let remote = prefill.prefill(&prompt).await;
        drop(prefill);
        let started = Instant::now();
        let error = refused(&decode, &remote, &prompt).await;
        assert!(matches!(error, PullError::Handoff(HandoffError::Unreachable { .. })), "{error}");
        assert!(started.elapsed() < Duration::from_secs(11));
    }
}

#[tokio::test]
async fn a_prefill_that_was_restarted_is_never_read_as_the_old_one() {
    for transport in BOTH {
        let setup = Setup::new("prefill", transport);
        let first = Side::start(&setup);
        let decode = Side::start(&Setup::new("decode", transport));
        let prompt = prompt(100, 1);
        // A kept connection must not hide the restart.
        let warm = first.prefill(&prompt).await;
        decode.pull(&warm, &prompt).await.unwrap();
        let remote = first.prefill(&super::prompt(100, 3)).await;
        let address: &'static str = Box::leak(first.handoff.address().to_owned().into_boxed_str());
        drop(first);
        let second = Side::start(&Setup { listen: address, ..setup });
        let error = refused(&decode, &remote, &super::prompt(100, 3)).await;
        assert!(matches!(error, PullError::Handoff(HandoffError::PeerRestarted)), "{transport}: {error}");
        let again = second.prefill(&prompt).await;
        assert!(decode.pull(&again, &prompt).await.is_ok());
    }
}

#[tokio::test]
async fn a_cancelled_pull_returns_blocks_and_lease() {
    for transport in BOTH {
        let (prefill, decode) = pair(transport);
        let prompt = prompt(600, 1);
        for polls in 0..6 {
            let remote = prefill.prefill(&prompt).await;
            let mut pull = Box::pin(decode.pull(&remote, &prompt));
            for _ in 0..polls {
                let once = |context: &mut Context<'_>| Poll::Ready(pull.as_mut().poll(context).is_ready());
                if poll_fn(once).await {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(pull);
            whole(&decode.pool).await;
            if polls > 2 && prefill.handoff.leases_held() == 0 {
                whole(&prefill.pool).await;
            }
        }
        // A pull that never connected leaves its lease to expiry: it must still be usable.
        let remote = prefill.prefill(&prompt).await;
        assert!(decode.pull(&remote, &prompt).await.is_ok());
    }
}

#[tokio::test]
async fn a_full_pool_refuses_the_pull_and_the_lease_stays_for_another() {
    let prefill = Side::start(&Setup::new("prefill", TransportKind::Shm));
    let small = Side::start(&Setup { blocks: 4, ..Setup::new("small", TransportKind::Shm) });
    let large = Side::start(&Setup::new("large", TransportKind::Shm));
    let prompt = prompt(100, 1);
    let remote = prefill.prefill(&prompt).await;
    assert!(matches!(refused(&small, &remote, &prompt).await, PullError::Pool(_)));
    assert!(large.pull(&remote, &prompt).await.is_ok());
}
