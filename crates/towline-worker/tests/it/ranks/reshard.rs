//! KV that moves between engines of unequal ranks: byte-exact over both transports, from the ticket alone.

use std::sync::Arc;

use towline_wire::engine_card::{EngineCard, RankAgent};
use towline_wire::layout::{Arrangement, HeadOrder};
use towline_wire::lease::Readers;
use towline_wire::receipt::TransportKind;
use towline_wire::shard::Sharding;

use super::models::{self, LAYERS, Model, Style};
use super::oracle::{Engine, Scatter, all, needed};
use super::{BOTH, Destination, Owner, PATIENCE, eventually};

/// Heads before tokens, layers together.
const HND: Style = Style::PLAIN;
/// Tokens before heads, an array for each part of each layer, small blocks, other groups.
const NHD: Style = Style {
    block_tokens: 8,
    heads: HeadOrder::Nhd,
    arrangement: Arrangement::LayerMajor,
    regrouped: true,
    ..Style::PLAIN
};

fn tp(tp_size: u32) -> Sharding {
    Sharding { tp_size, stage_layers: vec![LAYERS] }
}

async fn check(model: Model, from: (Style, Sharding), into: (Style, Sharding)) {
    let tokens = 0..45;
    for transport in BOTH {
        let scatter = Scatter::Shuffled(7);
        let mut source = Engine::new(models::layout(model, from.0), from.1.clone(), all(&tokens), scatter);
        source.fill(all(&tokens));
        let owner = Owner::start(source, PATIENCE);
        let empty = Engine::new(models::layout(model, into.0), into.1.clone(), needed(&tokens), scatter);
        let readers = Destination::start(empty, transport);
        let hold = Arc::new(());
        let lent = owner.lend_whole(tokens.end, readers.readers(), &hold);
        let receipts = readers.pull_all(&lent, &tokens).await;
        readers.check_all(&tokens);
        for receipt in receipts.iter().flatten() {
            assert_eq!((receipt.transport, receipt.lease), (transport, Some(lent.lease.lease)));
            let rails: u64 = receipt.rails.iter().map(|rail| rail.bytes).sum();
            assert!(receipt.bytes > 0 && rails == receipt.bytes && receipt.evidence.proves());
        }
        eventually("the last reader's release frees every rank", || Arc::strong_count(&hold) == 1).await;
        assert_eq!(owner.held(), 0);
    }
}

#[tokio::test]
async fn one_rank_to_four() {
    check(Model::Gqa(4), (HND, tp(1)), (HND, tp(4))).await;
    check(Model::Gqa(4), (HND, tp(1)), (NHD, tp(4))).await;
}

#[tokio::test]
async fn four_ranks_to_one() {
    check(Model::Gqa(4), (HND, tp(4)), (HND, tp(1))).await;
    check(Model::Gqa(4), (NHD, tp(4)), (HND, tp(1))).await;
}

#[tokio::test]
async fn latents_of_two_ranks_to_two() {
    check(Model::Mla, (HND, tp(2)), (HND, tp(2))).await;
    check(Model::Mla, (NHD, tp(2)), (HND, tp(2))).await;
}

#[tokio::test]
async fn more_ranks_than_heads_to_stages_of_a_pipeline() {
    let stages = Sharding { tp_size: 2, stage_layers: vec![2, 4] };
    check(Model::Gqa(2), (HND, tp(4)), (HND, stages.clone())).await;
    check(Model::State, (HND, stages), (NHD, tp(1))).await;
}

#[test]
fn the_ticket_names_the_ranks_that_the_engines_card_names() {
    let tokens = 0..32;
    let mut source = Engine::new(models::layout(Model::Gqa(4), HND), tp(2), all(&tokens), Scatter::Tight);
    source.fill(all(&tokens));
    let owner = Owner::start(source, PATIENCE);
    let lent = owner.lend_whole(tokens.end, Readers::First(1), &Arc::new(()));
    let cards: Vec<_> = owner.agents.iter().flatten().map(|agent| agent.card()).collect();
    let card = EngineCard {
        engine: owner.lender.engine,
        sharding: owner.oracle.sharding.clone(),
        layout: owner.oracle.layout.clone(),
        fingerprint: cards[0].fingerprint.clone(),
        ranks: cards.iter().map(|card| RankAgent::Card(Box::new(card.clone()))).collect(),
    };
    let card = EngineCard::decode(&card.encode()).unwrap();
    let ticket = lent.ticket.ticket;
    assert_eq!(
        (ticket.engine, ticket.sharding(), ticket.layout),
        (card.engine, card.sharding, Some(card.layout))
    );
    for ((rank, agent), theirs) in ticket.ranks.iter().zip(&card.ranks).zip(&cards) {
        assert_eq!((&rank.agent, rank.boot_epoch), (agent.agent(), theirs.boot_epoch));
        assert_eq!((Some(rank.region), Some(rank.fence_region)), (theirs.kv_region, theirs.fence_region));
    }
}

#[tokio::test]
async fn each_rank_reads_only_those_that_have_what_it_lacks() {
    let tokens = 0..32;
    let mut source = Engine::new(models::layout(Model::Mla, HND), tp(2), all(&tokens), Scatter::Tight);
    source.fill(all(&tokens));
    let owner = Owner::start(source, PATIENCE);
    let empty = Engine::new(models::layout(Model::Mla, HND), tp(2), needed(&tokens), Scatter::Tight);
    let readers = Destination::start(empty, TransportKind::Tcp);
    let lent = owner.lend_whole(tokens.end, readers.readers(), &Arc::new(()));
    assert_eq!(lent.ticket.ticket.tables.len(), 1, "ranks with the same blocks share a table");
    for (rank, receipts) in readers.pull_all(&lent, &tokens).await.into_iter().enumerate() {
        let from: Vec<_> = receipts.iter().map(|receipt| receipt.remote_agent.clone()).collect();
        assert_eq!(from, [format!("p/{rank}")], "latents are on every rank: each reads its peer");
        assert_eq!((receipts[0].blocks, receipts[0].descriptors_merged), (2, 1));
    }
}
