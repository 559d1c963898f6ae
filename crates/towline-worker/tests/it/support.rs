//! Tiny models on disk and caches to run them over.

use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use towline_fabric::Memory;
use towline_worker::kernel::Level;
use towline_worker::model::{KvCache, LoadOptions, Logits, Model, Sequence};
use towline_worker::testing::TinyModel;

/// A model file that lives as long as this.
pub(crate) struct OnDisk {
    _folder: TempDir,
    pub(crate) path: PathBuf,
}

pub(crate) fn write(tiny: &TinyModel) -> OnDisk {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny.write(&path).unwrap();
    OnDisk { _folder: folder, path }
}

pub(crate) fn load(tiny: &TinyModel, threads: usize, level: Level) -> Model {
    let options = LoadOptions { threads, level: Some(level), ..LoadOptions::default() };
    Model::load(&write(tiny).path, &options).unwrap()
}

/// A cache of `blocks` blocks whose every byte is `filler`: 0xff makes NaNs of all values.
pub(crate) fn cache(model: &Model, block_tokens: u32, blocks: u32, filler: u8) -> KvCache {
    let layout = model.layout(block_tokens);
    let memory = Memory::allocate("test", layout.groups[0].block_bytes() * u64::from(blocks)).unwrap();
    memory.write_from(0, &vec![filler; usize::try_from(memory.len()).unwrap()]).unwrap();
    KvCache::new(Arc::new(memory), &layout).unwrap()
}

/// Tokens that look random and are always the same.
pub(crate) fn prompt(model: &Model, len: usize, seed: usize) -> Vec<u32> {
    let vocab = model.config().vocab;
    (0..len).map(|i| u32::try_from((i * i * 31 + i * 17 + seed * 101 + 7) % vocab).unwrap()).collect()
}

/// Runs `tokens` in pieces of at most `piece` over `blocks`; logits after each piece.
pub(crate) fn run(
    model: &mut Model,
    cache: &KvCache,
    blocks: &[u32],
    tokens: &[u32],
    piece: usize,
) -> Vec<Logits> {
    let mut position = 0;
    let mut out = Vec::new();
    for tokens in tokens.chunks(piece) {
        let sequence = Sequence { tokens, position, blocks, want_logits: true };
        out.push(model.forward(cache, &[sequence]).unwrap().pop().flatten().unwrap());
        position += tokens.len();
    }
    out
}

pub(crate) fn bits(logits: &Logits) -> Vec<u32> {
    logits.0.iter().map(|logit| logit.to_bits()).collect()
}
