//! The cargo-fuzz crate beside this one: that it has every target, and its first corpus.

use std::fs;
use std::path::Path;

use super::TARGETS;

#[test]
fn cargo_fuzz_has_every_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let mut files: Vec<String> = fs::read_dir(folder.join("fuzz_targets"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    files.sort();
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(files, names, "fuzz_targets/ and the table of targets");
    for name in names {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "fuzz/Cargo.toml has no bin {name}");
        let target = fs::read_to_string(folder.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(target.contains(&format!("harness::{name}(bytes)")), "{name}.rs calls another harness");
    }
}

/// Sealed messages can't be found by chance. `make fuzz` names a folder; without one there is nothing to do.
#[test]
fn seeds_are_written_where_cargo_fuzz_looks() {
    let Some(folder) = std::env::var_os("TOWLINE_FUZZ_CORPUS") else { return };
    for target in TARGETS {
        let corpus = Path::new(&folder).join(target.name);
        fs::create_dir_all(&corpus).unwrap();
        for (index, seed) in (target.seeds)().iter().enumerate() {
            fs::write(corpus.join(format!("seed-{index}")), seed).unwrap();
        }
    }
}
