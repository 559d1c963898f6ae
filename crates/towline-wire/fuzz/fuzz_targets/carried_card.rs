//! Carried cards, for cargo-fuzz. What must hold is in the harness, which the stable tests call too.

#![no_main]

#[allow(dead_code, unused_imports, reason = "each target calls one harness of the shared file")]
#[path = "../../tests/it/fuzz/harness/mod.rs"]
mod harness;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    harness::carried_card(bytes);
});
