//! Where `unsafe` may stand. A file outside the list, or a line of the list without a file, fails.

use crate::tree;

/// Folders and files that may hold `unsafe`, and what for.
const ALLOWED: &[(&str, &str)] = &[
    (
        "crates/towline/src/bench/raw/",
        "the limits of `bench kv`: copies, cross-memory attach and vectors on mapped memory, by address",
    ),
    (
        "crates/towline-fabric/src/region/",
        "maps memory that other processes may read or write, and copies out of it",
    ),
    ("crates/towline-ffi/src/", "calls libraries that are opened at run time, by hand-written layouts"),
    ("crates/towline-worker/src/kernel/", "SIMD, and threads that write disjoint parts of one buffer"),
];

/// Whether a line of code holds the word, comments and strings set aside.
fn holds_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let code: String = code.split('"').step_by(2).collect();
    code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
}

#[test]
fn unsafe_stands_only_where_the_list_says() {
    let sources = tree::files("crates", |name| name.ends_with(".rs") && name.contains("/src/"));
    let with: Vec<String> = sources
        .into_iter()
        .filter(|(_, text)| text.lines().any(holds_unsafe))
        .map(|(name, _)| name)
        .collect();
    for name in &with {
        let listed = ALLOWED.iter().any(|(place, _)| name.starts_with(place));
        assert!(listed, "{name} holds `unsafe` and is not on the list of {}", file!());
    }
    for (place, why) in ALLOWED {
        let used = with.iter().any(|name| name.starts_with(place));
        assert!(used, "{place} ({why}) holds no `unsafe` any more: take it off the list");
    }
}

#[test]
fn crates_without_a_listed_place_forbid_unsafe() {
    for (name, text) in
        tree::files("crates", |name| name.ends_with("src/lib.rs") || name.ends_with("src/main.rs"))
    {
        let folder = name.rsplit_once('/').unwrap().0;
        let listed = ALLOWED.iter().any(|(place, _)| place.starts_with(folder));
        assert!(listed || text.contains("#![forbid(unsafe_code)]"), "{name} does not forbid unsafe code");
    }
}
