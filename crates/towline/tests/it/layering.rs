//! Which crate may know which: the table of ARCHITECTURE.md, held against the manifests.

use std::collections::{BTreeMap, BTreeSet};

use crate::tree;

/// A crate, its layer and the crates it may depend on. The binary, at the top, may depend on all.
const EDGES: &[(&str, u32, &[&str])] = &[
    ("towline-wire", 0, &[]),
    ("towline-topo", 0, &[]),
    ("towline-ffi", 0, &[]),
    ("towline-kube", 0, &[]),
    ("towline-fabric", 1, &["towline-wire", "towline-topo", "towline-ffi"]),
    ("towline-doctor", 1, &["towline-wire", "towline-topo", "towline-kube"]),
    ("towline-plan", 1, &["towline-wire", "towline-topo"]),
    ("towline-worker", 2, &["towline-wire", "towline-topo", "towline-fabric"]),
    ("towline-router", 2, &["towline-wire", "towline-topo", "towline-plan"]),
    ("towline-py", 3, &["towline-wire", "towline-fabric"]),
    ("towline", 3, ALL),
];
const ALL: &[&str] = &[
    "towline-wire",
    "towline-topo",
    "towline-ffi",
    "towline-kube",
    "towline-fabric",
    "towline-doctor",
    "towline-plan",
    "towline-worker",
    "towline-router",
];
/// What a crate without I/O can't depend on.
const WORLD: &[&str] = &["tokio", "mio", "rustix", "libc", "hyper", "axum", "socket2", "getrandom"];
const PURE: &[&str] = &["towline-wire", "towline-plan", "towline-doctor", "towline-kube"];

type Manifests = BTreeMap<String, toml::Table>;

fn manifests() -> Manifests {
    let files = tree::files("crates", |name| name.ends_with("/Cargo.toml") && name.matches('/').count() == 2);
    files
        .into_iter()
        .map(|(name, text)| {
            let manifest: toml::Table = text.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
            (manifest["package"]["name"].as_str().unwrap().to_owned(), manifest)
        })
        .collect()
}

fn names(manifest: &toml::Table, table: &str) -> BTreeSet<String> {
    let direct = manifest.get(table).into_iter();
    let targets = manifest.get("target").and_then(|targets| targets.as_table()).into_iter().flatten();
    let all = direct.chain(targets.filter_map(|(_, target)| target.get(table)));
    all.filter_map(|table| table.as_table()).flat_map(|table| table.keys().cloned()).collect()
}

fn rule(name: &str) -> &'static (&'static str, u32, &'static [&'static str]) {
    EDGES.iter().find(|(known, ..)| *known == name).unwrap_or_else(|| {
        panic!(
            "crate {name} is in no layer: add it to ARCHITECTURE.md and to this table, with a decision record"
        )
    })
}

#[test]
fn crates_depend_only_along_the_allowed_edges() {
    for (name, manifest) in manifests() {
        let (_, _, allowed) = rule(&name);
        for table in ["dependencies", "build-dependencies"] {
            for dependency in
                names(&manifest, table).iter().filter(|dependency| dependency.starts_with("towline"))
            {
                let fine = allowed.contains(&dependency.as_str());
                assert!(fine, "{name} -> {dependency} is not an edge of ARCHITECTURE.md");
            }
        }
    }
}

#[test]
fn tests_depend_downward_only() {
    for (name, manifest) in manifests() {
        let (_, layer, _) = rule(&name);
        let dependencies = names(&manifest, "dev-dependencies");
        for dependency in dependencies.iter().filter(|dependency| dependency.starts_with("towline")) {
            let downward = *dependency == name || rule(dependency).1 < *layer;
            assert!(downward, "the tests of {name} depend on {dependency}, which is not below it");
        }
    }
}

#[test]
fn pure_crates_cannot_reach_the_world() {
    for (name, manifest) in manifests().iter().filter(|(name, _)| PURE.contains(&name.as_str())) {
        let dependencies = names(manifest, "dependencies");
        let reached: Vec<_> = WORLD.iter().filter(|world| dependencies.contains(**world)).collect();
        assert!(reached.is_empty(), "{name} is pure, and depends on {reached:?}");
    }
}

#[test]
fn every_crate_keeps_the_workspace_lints() {
    for (name, manifest) in manifests() {
        let kept = manifest.get("lints").and_then(|lints| lints.get("workspace")) == Some(&true.into());
        assert!(kept, "{name} has no `[lints] workspace = true`");
    }
}
