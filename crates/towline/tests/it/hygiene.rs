//! What a reviewer would otherwise look for by hand: prints, sizes, leftovers, paths of somebody's machine.

use crate::tree;

/// Most lines of a Rust file without a reason at its head.
const LINES_MAX: usize = 500;
/// How many lines count as the head.
const HEAD_LINES: usize = 12;

#[test]
fn only_the_binary_prints_and_exits() {
    let words = ["println!", "eprintln!", "print!(", "process::exit", "io::stdout()", "io::stderr()"];
    let sources = tree::files("crates", |name| name.ends_with(".rs") && name.contains("/src/"));
    for (name, text) in sources.into_iter().filter(|(name, _)| !name.starts_with("crates/towline/")) {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (index, line) in code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
        {
            let found = words.iter().find(|word| line.contains(**word));
            assert!(
                found.is_none(),
                "{name}:{}: {}: only `towline` prints and exits",
                index + 1,
                line.trim()
            );
        }
    }
}

#[test]
fn long_files_say_why() {
    for (name, text) in tree::rust_files() {
        let lines = text.lines().count();
        let reasoned = text.lines().take(HEAD_LINES).any(|line| line.contains("Long:"));
        assert!(
            lines <= LINES_MAX || reasoned,
            "{name} has {lines} lines and no \"Long:\" reason at its head"
        );
    }
}

#[test]
fn every_file_says_why_it_exists() {
    for (name, text) in tree::rust_files() {
        let first = text.lines().next().unwrap_or_default();
        assert!(first.starts_with("//!") && first.len() > 12, "{name} does not begin with why it exists");
    }
}

/// An ignored test is one that nobody runs, but for those that another test runs in a process of its own.
#[test]
fn no_test_is_ignored() {
    let mark = concat!("#[", "ignore");
    for (name, text) in tree::rust_files() {
        let left = text.lines().find(|line| line.contains(mark) && !line.contains("run by "));
        assert!(left.is_none(), "{name} ignores a test: run it, or list it as skipped with a reason");
    }
}

#[test]
fn no_paths_of_a_machine() {
    let roots = ["work", "farm", "root", "home"].map(|name| format!("/{name}/"));
    let wanted = |name: &str| !name.ends_with(".lock") && !name.starts_with("shared/");
    for (name, text) in tree::files(".", wanted) {
        for (index, line) in text.lines().enumerate() {
            let found = roots.iter().find(|root| {
                line.match_indices(root.as_str()).any(|(at, _)| {
                    let before = line.as_bytes()[..at].last();
                    before.is_none_or(|byte| b" \"'`(=:".contains(byte))
                })
            });
            assert!(found.is_none(), "{name}:{}: a path of some machine: {}", index + 1, line.trim());
        }
    }
}
