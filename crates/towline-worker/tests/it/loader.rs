//! Files that are cut, altered or not models at all: a typed error each, never a panic.

use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value, write as write_gguf};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use towline_worker::kernel::Level;
use towline_worker::model::{LoadError, LoadOptions, Model};
use towline_worker::testing::TinyModel;

use crate::support::{OnDisk, write};

fn load(path: &Path) -> Result<Model, LoadError> {
    Model::load(path, &LoadOptions { threads: 1, level: Some(Level::Scalar), ..LoadOptions::default() })
}

fn small() -> OnDisk {
    write(&TinyModel { layers: 1, ..TinyModel::default() })
}

fn load_bytes(bytes: &[u8]) -> Result<Model, LoadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("altered.gguf");
    std::fs::write(&path, bytes).unwrap();
    load(&path)
}

/// The small model with its metadata and tensors changed.
fn altered(
    metadata: impl Fn(&mut Vec<(String, Value)>),
    tensors: impl Fn(&mut Vec<(String, QTensor)>),
) -> Result<Model, LoadError> {
    let original = small();
    let mut file = std::fs::File::open(&original.path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut entries: Vec<(String, Value)> = content.metadata.clone().into_iter().collect();
    let names = content.tensor_infos.keys().cloned();
    let mut all: Vec<(String, QTensor)> =
        names.map(|name| (name.clone(), content.tensor(&mut file, &name, &Device::Cpu).unwrap())).collect();
    metadata(&mut entries);
    tensors(&mut all);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("altered.gguf");
    let entries: Vec<(&str, &Value)> = entries.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let all: Vec<(&str, &QTensor)> = all.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_gguf(&mut std::fs::File::create(&path).unwrap(), &entries, &all).unwrap();
    load(&path)
}

fn with(key: &str, value: Value) -> LoadError {
    let set = |entries: &mut Vec<(String, Value)>| {
        entries.retain(|(name, _)| name != key);
        entries.push((key.to_owned(), value.clone()));
    };
    altered(set, |_| ()).unwrap_err()
}

fn zeros(shape: &[usize]) -> QTensor {
    QTensor::quantize(&Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32)
        .unwrap()
}

#[test]
fn cut_files_are_damaged() {
    let bytes = std::fs::read(small().path).unwrap();
    let header = 12_000.min(bytes.len());
    let cuts = (0..64)
        .chain((64..header).step_by(173))
        .chain((header..bytes.len()).step_by(4099))
        .chain([bytes.len() - 1]);
    for cut in cuts {
        let error = load_bytes(&bytes[..cut]).unwrap_err();
        assert!(
            matches!(error, LoadError::Damaged { .. } | LoadError::NotGguf { .. }),
            "cut at {cut}: {error}"
        );
    }
}

#[test]
fn flipped_bytes_of_the_header_never_panic() {
    let bytes = std::fs::read(small().path).unwrap();
    let spots = (0..700).chain((700..14_000).step_by(37)).filter(|at| *at < bytes.len());
    for at in spots {
        for flip in [0x01, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] ^= flip;
            // Some flips are harmless (a letter of the name); none may panic or take long.
            if let Err(error) = load_bytes(&changed) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

#[test]
fn huge_claims_are_refused_before_they_are_allocated() {
    let bytes = std::fs::read(small().path).unwrap();
    for (at, what) in [(8, "tensor count"), (16, "metadata count"), (24, "length of the first key")] {
        for claim in [u64::MAX, 1 << 62, 1 << 40, 1 << 31] {
            let mut changed = bytes.clone();
            changed[at..at + 8].copy_from_slice(&claim.to_le_bytes());
            assert!(matches!(load_bytes(&changed), Err(LoadError::Damaged { .. })), "{what} of {claim}");
        }
    }
}

#[test]
fn other_files_are_named_for_what_they_are() {
    assert!(matches!(load(Path::new("/nonexistent/model.gguf")), Err(LoadError::Open { .. })));
    assert!(matches!(load(Path::new("/")), Err(LoadError::NotGguf { .. } | LoadError::Open { .. })));
    for bytes in
        [&b"PK\x03\x04 a zip file"[..], b"GGUF\x01\0\0\0", b"GGUF\x09\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"]
    {
        assert!(matches!(load_bytes(bytes), Err(LoadError::NotGguf { .. })));
    }
}

#[test]
fn metadata_that_no_model_has_is_named() {
    let named = |key: &str, value: Value| {
        let error = with(key, value);
        assert!(matches!(&error, LoadError::Key { key: found, .. } if found == key), "{key}: {error}");
    };
    for absurd in [0, u32::MAX, 1 << 24] {
        named("llama.block_count", Value::U32(absurd));
        named("llama.embedding_length", Value::U32(absurd));
        named("llama.feed_forward_length", Value::U32(absurd));
        named("llama.attention.head_count", Value::U32(absurd));
        named("llama.context_length", Value::U32(absurd));
    }
    named("llama.attention.head_count_kv", Value::U32(3));
    named("llama.block_count", Value::String("three".into()));
    named("llama.rope.freq_base", Value::F32(f32::NAN));
    named("llama.rope.dimension_count", Value::U32(48));
    named("llama.attention.layer_norm_rms_epsilon", Value::F32(-1.0));
    assert!(
        matches!(with("general.architecture", Value::String("mamba".into())), LoadError::Architecture { found } if found == "mamba")
    );
    for alignment in [0, 3, u32::MAX] {
        assert!(matches!(with("general.alignment", Value::U32(alignment)), LoadError::Damaged { .. }));
    }
    let missing =
        altered(|entries| entries.retain(|(key, _)| key != "llama.block_count"), |_| ()).unwrap_err();
    assert!(matches!(missing, LoadError::MissingKey { key } if key == "llama.block_count"));
}

#[test]
fn features_the_engine_lacks_are_refused_not_ignored() {
    for (key, value) in [
        ("llama.rope.scaling.type", Value::String("yarn".into())),
        ("llama.expert_count", Value::U32(8)),
        ("llama.attention.key_length", Value::U32(24)),
        ("llama.attention.sliding_window", Value::U32(128)),
    ] {
        assert!(matches!(with(key, value), LoadError::Unsupported { .. }), "{key}");
    }
    let bias =
        altered(|_| (), |tensors| tensors.push(("blk.0.attn_q.bias".into(), zeros(&[64])))).unwrap_err();
    assert!(matches!(bias, LoadError::Unsupported { what } if what.contains("attn_q.bias")));
}

#[test]
fn tensors_that_are_missing_or_misshapen_are_named() {
    for name in ["token_embd.weight", "blk.0.ffn_up.weight", "output_norm.weight", "blk.0.attn_norm.weight"] {
        let error = altered(|_| (), |tensors| tensors.retain(|(found, _)| found != name)).unwrap_err();
        assert!(matches!(&error, LoadError::MissingTensor { name: found } if found == name), "{error}");
        let error = altered(
            |_| (),
            |tensors| {
                tensors.retain(|(found, _)| found != name);
                tensors.push((name.to_owned(), zeros(&[3, 32])));
            },
        );
        assert!(matches!(error.unwrap_err(), LoadError::TensorShape { name: found, .. } if found == name));
    }
}

#[test]
fn tokenizers_that_cannot_be_used_are_named() {
    for (key, value) in [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.pre", Value::String("unheard-of".into())),
        ("tokenizer.ggml.merges", Value::Array(vec![Value::String("no such".into())])),
        ("tokenizer.ggml.merges", Value::Array(vec![Value::String("nospace".into())])),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)])),
        ("tokenizer.ggml.eos_token_id", Value::U32(5000)),
    ] {
        assert!(matches!(with(key, value), LoadError::Tokenizer(_)), "{key}");
    }
    assert!(matches!(
        with("tokenizer.chat_template", Value::String("{% for %}".into())),
        LoadError::Template(_)
    ));
}

#[test]
fn weights_that_are_not_numbers_still_load_and_run() {
    let nan = |tensors: &mut Vec<(String, QTensor)>| {
        let values = Tensor::from_vec(vec![f32::NAN; 64], 64, &Device::Cpu).unwrap();
        tensors.retain(|(name, _)| name != "output_norm.weight");
        tensors.push(("output_norm.weight".into(), QTensor::quantize(&values, GgmlDType::F32).unwrap()));
    };
    let mut model = altered(|_| (), nan).unwrap();
    let pool = crate::support::cache(&model, 16, 1, 0);
    crate::support::run(&mut model, &pool, &[0], &[1, 2, 3], 3);
}
