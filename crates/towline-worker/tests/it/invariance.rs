//! A token's logits are the same bits whatever shares its step and however its prompt was cut.

use towline_worker::kernel::Level;
use towline_worker::model::{ForwardError, LoadOptions, Model, Sequence};
use towline_worker::testing::TinyModel;

use crate::support::{bits, cache, load, prompt, run, write};

#[test]
fn chunks_threads_levels_blocks_and_rubbish_change_no_bit() {
    let tiny = TinyModel::default();
    let mut model = load(&tiny, 1, Level::Scalar);
    let tokens = prompt(&model, 300, 0);
    let ascending: Vec<u32> = (0..19).collect();
    let first = cache(&model, 16, 19, 0);
    let expected = bits(run(&mut model, &first, &ascending, &tokens, 300).last().unwrap());
    let shuffled: Vec<u32> = (0..19).map(|index| (index * 7 + 2) % 19).collect();
    for level in Level::available() {
        for threads in 1..=3 {
            let mut model = load(&tiny, threads, level);
            for piece in [1, 7, 64, 299] {
                let rubbish = cache(&model, 16, 19, 0xff);
                let found = run(&mut model, &rubbish, &shuffled, &tokens, piece);
                assert!(
                    bits(found.last().unwrap()) == expected,
                    "{level:?}, {threads} threads, pieces of {piece}"
                );
            }
        }
    }
}

#[test]
fn companions_in_a_step_change_no_bit() {
    let mut model = load(&TinyModel { tied: false, ..TinyModel::default() }, 2, Level::best());
    let prompts: Vec<Vec<u32>> = (0..4).map(|seed| prompt(&model, 20 + seed * 13, seed)).collect();
    let tables: Vec<Vec<u32>> =
        (0..4).map(|sequence| (0..5).map(|block| block * 4 + sequence).collect()).collect();
    let alone: Vec<_> = prompts
        .iter()
        .map(|tokens| {
            let cache = cache(&model, 16, 5, 0);
            bits(run(&mut model, &cache, &[0, 1, 2, 3, 4], tokens, 512).last().unwrap())
        })
        .collect();
    let shared = cache(&model, 16, 20, 0xff);
    // Two sequences are decoding their last token while the two others prefill.
    for sequence in 0..2 {
        let (_, head) = prompts[sequence].split_last().unwrap();
        run(&mut model, &shared, &tables[sequence], head, 512);
    }
    let batch: Vec<Sequence<'_>> = (0..4)
        .map(|index| {
            let position = if index < 2 { prompts[index].len() - 1 } else { 0 };
            Sequence {
                tokens: &prompts[index][position..],
                position,
                blocks: &tables[index],
                want_logits: index != 2,
            }
        })
        .collect();
    let found = model.forward(&shared, &batch).unwrap();
    assert!(found[2].is_none(), "not asked for");
    for index in [0, 1, 3] {
        assert!(bits(found[index].as_ref().unwrap()) == alone[index], "sequence {index}");
    }
}

#[test]
fn a_cache_copied_to_another_engine_continues_with_the_same_bits() {
    let tiny = TinyModel { layers: 2, heads: 6, kv_heads: 3, head_dim: 32, ..TinyModel::default() };
    let (mut prefill, mut decode) = (load(&tiny, 2, Level::best()), load(&tiny, 1, Level::Scalar));
    assert_eq!(prefill.fingerprint(), decode.fingerprint());
    let tokens = prompt(&prefill, 70, 3);
    let (here, there) = (cache(&prefill, 16, 8, 0), cache(&decode, 16, 8, 0xff));
    let blocks = [6, 1, 4, 0, 3];
    run(&mut prefill, &here, &blocks, &tokens[..69], 512);
    // The handoff: blocks arrive at other places.
    let elsewhere = [2, 7, 5, 1, 0];
    for (from, to) in blocks.iter().zip(elsewhere) {
        let bytes = here.block_bytes();
        there
            .memory()
            .copy_from(u64::from(to) * bytes, here.memory(), u64::from(*from) * bytes, bytes)
            .unwrap();
    }
    let last = |model: &mut Model, cache, blocks| {
        let sequence = Sequence { tokens: &tokens[69..], position: 69, blocks, want_logits: true };
        bits(model.forward(cache, &[sequence]).unwrap()[0].as_ref().unwrap())
    };
    assert!(last(&mut decode, &there, &elsewhere) == last(&mut prefill, &here, &blocks));
}

#[test]
fn fingerprints_name_what_differs() {
    let print = |tiny: &TinyModel| load(tiny, 1, Level::best()).fingerprint();
    let base = print(&TinyModel::default());
    let seed = print(&TinyModel { seed: 2, ..TinyModel::default() });
    assert_ne!(base.weights, seed.weights);
    assert_eq!((&base.architecture, &base.rope), (&seed.architecture, &seed.rope));
    let rope = print(&TinyModel { rope_base: 500.0, ..TinyModel::default() });
    assert_eq!(base.weights, rope.weights);
    assert_ne!(base.rope, rope.rope);
    let shape = print(&TinyModel { layers: 2, ..TinyModel::default() });
    assert_ne!(base.architecture, shape.architecture);
    assert_eq!(
        print(&TinyModel { context: 64, ..TinyModel::default() }),
        base,
        "the context's length changes no arithmetic"
    );
}

#[test]
fn impossible_batches_are_named_and_write_nothing() {
    let file = write(&TinyModel { context: 100, ..TinyModel::default() });
    let mut model =
        Model::load(&file.path, &LoadOptions { step_tokens: 64, ..LoadOptions::default() }).unwrap();
    let pool = cache(&model, 16, 8, 0xaa);
    let tokens = [5; 65];
    let sequence = |tokens, position, blocks| Sequence { tokens, position, blocks, want_logits: true };
    let table = [0, 1, 2, 3, 4, 5, 6];
    let mut refuse = |batch: &[Sequence<'_>], error: ForwardError| {
        assert_eq!(model.forward(&pool, batch).unwrap_err(), error)
    };
    refuse(&[sequence(&tokens, 0, &table)], ForwardError::StepTokens { tokens: 65, max: 64 });
    refuse(&[sequence(&[], 0, &table)], ForwardError::NoTokens { sequence: 0 });
    refuse(&[sequence(&[9999], 0, &table)], ForwardError::Token { sequence: 0, token: 9999, vocab: 275 });
    refuse(&[sequence(&[1], 100, &table)], ForwardError::Context { sequence: 0, end: 101, context: 100 });
    refuse(
        &[sequence(&[1], usize::MAX, &table)],
        ForwardError::Context { sequence: 0, end: usize::MAX, context: 100 },
    );
    refuse(&[sequence(&[1], 32, &table[..2])], ForwardError::BlockTable { sequence: 0, needed: 3, found: 2 });
    refuse(&[sequence(&[1], 0, &[8])], ForwardError::Block { sequence: 0, block: 8, blocks: 8 });
    let twice = [sequence(&[1], 0, &[3]), sequence(&[1], 16, &[0, 3])];
    refuse(&twice, ForwardError::SharedBlock { sequence: 1, block: 3 });
    let mut seen = vec![0; usize::try_from(pool.memory().len()).unwrap()];
    pool.memory().read_into(0, &mut seen).unwrap();
    assert!(seen.iter().all(|byte| *byte == 0xaa));
    assert_eq!(model.forward(&pool, &[]), Ok(vec![]));
    let other = load(&TinyModel { kv_heads: 4, ..TinyModel::default() }, 1, Level::best());
    let foreign = cache(&other, 16, 2, 0);
    assert_eq!(model.forward(&foreign, &[sequence(&[1], 0, &[0])]), Err(ForwardError::Layout));
}
