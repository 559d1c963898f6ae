//! `docs/cli.md`, written from the same declarations that `--help` reads, and held fresh by this test.

use std::fmt::Write;
use std::path::Path;

use clap::{Arg, Command};

const HEAD: &str = "\
# The command line

<!-- Generated from crates/towline/src/cli.rs: UPDATE_DOCS=1 cargo test -p towline -->

Every flag is also an environment variable and a key of the configuration file (TOML, `--config FILE`, or `towline.toml`
in the working directory). A flag wins over a variable, a variable over the file, the file over the default. A key has
the flag's name and stands in its subcommand's table; the keys that every subcommand takes stand at the top:

```toml
log = \"info\"

[worker]
threads = 4
kv-cache = \"2GiB\"

[router]
prefill = [\"http://10.0.0.1:8100\"]
decode = [\"http://10.0.0.2:8100\"]
```

The cluster's key is the exception: it is read from a file (`--cluster-key-file`) or from `TOWLINE_CLUSTER_KEY`, and no
flag takes it, because arguments are visible to every process of a machine.

Exit codes: 0 fine, 1 findings, 2 usage or failure, 3 could not tell.
";

fn page() -> String {
    let root = crate::config::command();
    let mut page = HEAD.to_owned();
    section(&mut page, "Every subcommand", "", &root);
    subsections(&mut page, "towline", &root);
    page
}

/// A section for each subcommand that takes arguments of its own.
fn subsections(page: &mut String, path: &str, command: &Command) {
    for sub in command.get_subcommands() {
        let path = format!("{path} {}", sub.get_name());
        if sub.has_subcommands() {
            subsections(page, &path, sub);
        } else {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            section(page, &format!("`{path}`"), &about, sub);
        }
    }
}

fn section(page: &mut String, title: &str, about: &str, command: &Command) {
    let about = if about.is_empty() { String::new() } else { format!("{about}.\n\n") };
    write!(page, "\n## {title}\n\n{about}| flag | what | default | variable |\n| --- | --- | --- | --- |\n")
        .unwrap();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        writeln!(page, "{}", row(arg)).unwrap();
    }
}

fn row(arg: &Arg) -> String {
    let flag = arg.get_long().unwrap();
    let value =
        arg.get_value_names().unwrap_or_default().first().map(|name| format!(" {name}")).unwrap_or_default();
    let value = if arg.is_require_equals_set() { format!("[={}]", value.trim()) } else { value };
    let mut what = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let words: Vec<String> =
        arg.get_possible_values().iter().map(|word| format!("`{}`", word.get_name())).collect();
    if !words.is_empty() && !arg.is_require_equals_set() {
        write!(what, " ({})", words.join(", ")).unwrap();
    }
    let default: Vec<_> =
        arg.get_default_values().iter().map(|word| format!("`{}`", word.display())).collect();
    let default = if arg.is_required_set() { "required".to_owned() } else { default.join(", ") };
    let variable = arg.get_env().unwrap().display();
    format!("| `--{flag}{value}` | {} | {default} | `{variable}` |", what.replace('|', "\\|"))
}

#[test]
fn command_line_page_is_fresh() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, page).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(found, page, "docs/cli.md is stale: UPDATE_DOCS=1 cargo test -p towline");
}

#[test]
fn every_argument_says_what_it_is() {
    let mut root = crate::config::command();
    root.build();
    explained(&root);
}

fn explained(command: &Command) {
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        for arg in sub.get_arguments() {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.len() > 3 && !help.ends_with('.'),
                "{} --{}: {help:?}",
                sub.get_name(),
                arg.get_id()
            );
            let named_unit =
                !help.contains("How long") && !help.contains("Longest") || help.contains("in seconds");
            assert!(named_unit, "--{} has no unit in its help", arg.get_id());
        }
        explained(sub);
    }
}
