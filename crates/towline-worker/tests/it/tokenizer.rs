//! Tokens of the tiny model round-trip everything; those of the real one are llama.cpp's.

use std::path::Path;

use towline_worker::kernel::Level;
use towline_worker::model::{LoadOptions, Model};
use towline_worker::testing::{EOS, SPECIALS, TinyModel};
use towline_worker::text::{Decoder, Tokenizer};

use crate::support::load;

/// Texts of every kind: each byte that can stand in UTF-8, scripts, emoji, code, digits, whitespace, specials.
fn texts() -> Vec<String> {
    let fixed = [
        "",
        " ",
        "Hello, world!",
        "the theory in the end",
        "  two  spaces ",
        "\r\n\t\n",
        "a1b22c333 3.14",
        "fn main() { x += 1; }",
        "Привет, мир",
        "你好，世界",
        "नमस्ते",
        "مرحبا",
        "안녕하세요",
        "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
        "e\u{301}\u{302}",
        "\u{feff}\u{200b}\u{202e}",
        "\0\u{1}\u{7f}",
        "<|im_start|>user\nHi<|im_end|>",
        "<|endoftext|><|im_end",
        "\u{10ffff}\u{e000}",
    ];
    let mut texts: Vec<String> = fixed.iter().map(|text| (*text).to_owned()).collect();
    texts.extend((0..0x11_0000).step_by(997).filter_map(char::from_u32).map(|c| format!("x{c} {c}{c}y")));
    texts.extend((0..0x180).filter_map(char::from_u32).map(String::from));
    texts.extend(["a".repeat(5000), " ".repeat(5000), "7".repeat(500), "the ".repeat(500)]);
    texts
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = Decoder::new();
    let mut text: String = ids.iter().map(|id| decoder.push(tokenizer, *id)).collect();
    text += &decoder.finish();
    text
}

#[test]
fn text_round_trips_at_once_and_streamed() {
    for split in ["smollm", "gpt-2", "llama-bpe"] {
        let model = load(&TinyModel { split, ..TinyModel::default() }, 1, Level::Scalar);
        let tokenizer = model.tokenizer();
        for text in texts() {
            let ids = tokenizer.encode(&text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, true), text, "{split}");
            assert_eq!(streamed(tokenizer, &ids), text, "{split}");
            assert!(
                ids.iter().all(|id| !tokenizer.is_special(*id)),
                "{split}: {text:?} made a special token"
            );
            let ids = tokenizer.encode(&text, true).unwrap();
            assert_eq!(tokenizer.decode(&ids, true), text, "{split}");
        }
    }
}

#[test]
fn special_tokens_are_themselves_only_where_allowed() {
    let model = load(&TinyModel::default(), 1, Level::Scalar);
    let tokenizer = model.tokenizer();
    for (id, special) in (0..).zip(SPECIALS) {
        assert_eq!(tokenizer.encode(&format!("a{special}b"), true).unwrap()[1], id);
        assert!(tokenizer.encode(special, false).unwrap().len() > 1);
        assert!(tokenizer.is_special(id));
        assert_eq!(
            (tokenizer.decode(&[id], false), tokenizer.decode(&[id], true)),
            (String::new(), special.to_owned())
        );
    }
    assert!(tokenizer.is_eos(EOS) && tokenizer.is_eos(0) && !tokenizer.is_eos(1));
    assert_eq!((tokenizer.bos(), tokenizer.bos_to_add()), (Some(1), None));
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
}

#[test]
fn merges_and_single_digits_apply() {
    let model = load(&TinyModel::default(), 1, Level::Scalar);
    let count = |text| model.tokenizer().encode(text, false).unwrap().len();
    assert_eq!(count(" the"), 1, "two merges");
    assert_eq!(count("123"), 3);
    assert_eq!(count("ell"), 2, "`l l` ranks before `e l`");
}

#[test]
fn the_chat_template_writes_special_tokens() {
    let model = load(&TinyModel::default(), 1, Level::Scalar);
    let messages = serde_json::json!([{"role": "user", "content": "hi"}]);
    let prompt = model.template().unwrap().render(&messages, true).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = model.tokenizer().encode(&prompt, true).unwrap();
    assert_eq!(ids.iter().filter(|id| model.tokenizer().is_special(**id)).count(), 3);
}

/// Recorded with `fixtures/record_tokenizer.py` from llama.cpp.
#[test]
fn a_real_models_tokens_are_llama_cpps() {
    let Some(path) = std::env::var_os("TOWLINE_MODEL") else {
        println!("skipped: TOWLINE_MODEL is not set to SmolLM2-135M-Instruct's GGUF file");
        return;
    };
    let model = Model::load(Path::new(&path), &LoadOptions::default()).unwrap();
    let tokenizer = model.tokenizer();
    let recorded: serde_json::Value =
        serde_json::from_str(include_str!("fixtures/tokenizer_smollm.json")).unwrap();
    let mut wrong = Vec::new();
    for case in recorded.as_array().unwrap() {
        let (text, special) = (case["text"].as_str().unwrap(), case["special"].as_bool().unwrap());
        let expected: Vec<u32> = case["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
            .collect();
        let found = tokenizer.encode(text, special).unwrap();
        if found != expected {
            wrong.push(format!("{text:?} (special: {special}): {found:?}, llama.cpp has {expected:?}"));
        }
    }
    println!(
        "{} of {} texts agree",
        recorded.as_array().unwrap().len() - wrong.len(),
        recorded.as_array().unwrap().len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
