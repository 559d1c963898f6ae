//! Every argument, from every source, in every order of precedence that matters.

use super::*;

/// Words that some argument accepts; a new kind of value adds one here.
const SAMPLES: [&str; 11] = [
    "1",
    "on",
    "tcp",
    "json",
    "127.0.0.1:0",
    "http://127.0.0.1:1",
    "true",
    "full",
    "recompute",
    "any",
    "alarm",
];

fn sample(arg: &Arg) -> String {
    let words = SAMPLES.iter().chain(&["prefill"]);
    let fits = |word: &&&str| check(arg, &[(**word).to_owned()]).is_ok();
    words.clone().find(fits).unwrap_or_else(|| panic!("no sample fits --{}", arg.get_id())).to_string()
}

fn toml_of(section: &str, key: &str, word: &str) -> String {
    let quoted = if word == "true" { word.to_owned() } else { format!("{word:?}") };
    if section.is_empty() {
        format!("{key} = {quoted}\n")
    } else {
        format!("[{section}]\n{key} = {quoted}\n")
    }
}

fn error_of(text: &str) -> String {
    format!("{:#}", with_text(command(), text).expect_err(text))
}

#[test]
fn every_argument_has_a_variable_and_a_key() {
    let root = command();
    let sections =
        std::iter::once(("", &root)).chain(root.get_subcommands().map(|sub| (sub.get_name(), sub)));
    let mut count = 0;
    for (section, sub) in sections {
        for arg in sub.get_arguments() {
            let flag = arg.get_long().expect("every argument is a long flag");
            let prefix = if section.is_empty() {
                "TOWLINE".into()
            } else {
                format!("TOWLINE_{}", section.to_uppercase())
            };
            let variable = format!("{prefix}_{}", flag.to_uppercase().replace('-', "_"));
            assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(variable.as_str()));
            if flag == CONFIG {
                continue;
            }
            let word = sample(arg);
            let changed = with_text(command(), &toml_of(section, flag, &word))
                .unwrap_or_else(|error| panic!("{section}.{flag}: {error:#}"));
            let owner = if section.is_empty() { &changed } else { changed.find_subcommand(section).unwrap() };
            let now = owner.get_arguments().find(|now| now.get_id() == arg.get_id()).unwrap();
            assert_eq!(now.get_default_values(), [word.as_str()], "{section}.{flag}");
            assert!(!now.is_required_set(), "{section}.{flag} is still required on the command line");
            count += 1;
        }
    }
    assert!(count > 30, "only {count} arguments were walked");
}

#[test]
fn flag_wins_over_file_and_file_over_default() {
    let text = "format = 'json'\n[worker]\nrole = 'decode'\nmodel = 'm.gguf'\nthreads = 3\nmax-batch = 5\n";
    let settle = |args: &[&str]| {
        let matches = with_text(command(), text).unwrap().try_get_matches_from(args).unwrap();
        let cli = Cli::from_arg_matches(&matches).unwrap();
        let crate::cli::Action::Worker(worker) = cli.action else { panic!("not a worker") };
        (cli.global.format, worker.engine.threads, worker.engine.max_batch, worker.engine.block_tokens)
    };
    assert_eq!(settle(&["towline", "worker"]), (crate::cli::Format::Json, Some(3), 5, 16));
    assert_eq!(settle(&["towline", "worker", "--threads=7"]), (crate::cli::Format::Json, Some(7), 5, 16));
}

#[test]
fn lists_and_switches_come_from_the_file() {
    let text = "[router]\nprefill = ['http://a:1', 'http://b:2']\nforward-authorization = true\n";
    let settle = |args: &[&str]| {
        let matches = with_text(command(), text).unwrap().try_get_matches_from(args).unwrap();
        let crate::cli::Action::Router(router) = Cli::from_arg_matches(&matches).unwrap().action else {
            panic!("not a router")
        };
        (router.prefill.len(), router.forward_authorization)
    };
    assert_eq!(settle(&["towline", "router"]), (2, true));
    let off = ["towline", "router", "--forward-authorization=false", "--prefill", "http://c:3"];
    assert_eq!(settle(&off), (1, false));
}

#[test]
fn errors_name_the_key_and_the_nearest_known_one() {
    assert_eq!(
        error_of("[worker]\nthread = 4"),
        "unknown key worker.thread; the nearest known key is \"worker.threads\""
    );
    assert_eq!(error_of("formt = 'json'"), "unknown key formt; the nearest known key is \"format\"");
    assert_eq!(error_of("threads = 4"), "unknown key threads; it belongs in [up] or [worker]");
    assert!(error_of("[worker]\nlog = 'info'").contains("stands at the top"));
    assert!(error_of("[wroker]\nthreads = 4").contains("the nearest known key is \"worker\""));
    assert!(error_of("config = 'other.toml'").starts_with("unknown key config"));
}

#[test]
fn errors_name_the_key_of_a_bad_value() {
    for (text, key, part) in [
        ("[worker]\nthreads = 'many'", "worker.threads", "invalid value 'many'"),
        ("[worker]\nthreads = 0", "worker.threads", "0 is not in"),
        ("[worker]\nthreads = [1, 2]", "worker.threads", "found array"),
        ("[worker]\ntransport = 'rdma'", "worker.transport", "[possible values: auto, shm, tcp]"),
        ("[up]\naggregated = 'yes'", "up.aggregated", "expected true or false"),
        ("[up]\nmodel = true", "up.model", "expected a text or a number"),
        ("format = 'xml'", "format", "invalid value 'xml'"),
        ("[worker]\nkv-cache = '1 gig'", "worker.kv-cache", "for example 512MiB"),
    ] {
        let error = error_of(text);
        assert!(error.contains(&format!("key {key}")) && error.contains(part), "{text:?}: {error}");
    }
    assert!(error_of("threads = = 1").starts_with("not TOML"));
}
