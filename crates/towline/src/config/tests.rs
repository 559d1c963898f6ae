//! Every argument, from every source, in every order of precedence that matters.

use super::*;

/// Words that some argument accepts; a new kind of value adds one here.
const SAMPLES: [&str; 17] = [
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
    "prefill",
    "read",
    "one-to-one",
    "random",
    "llama-3.1-8b",
    "tp4:tp1",
];

fn sample(arg: &Arg) -> String {
    let fits = |word: &&&str| check(arg, &[(**word).to_owned()]).is_ok();
    SAMPLES.iter().find(fits).unwrap_or_else(|| panic!("no sample fits --{}", arg.get_id())).to_string()
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

/// Every command that takes arguments, by the dotted name of its table; the root's is empty.
fn sections() -> Vec<(String, Command)> {
    let mut found = vec![(String::new(), command())];
    let mut at = 0;
    while at < found.len() {
        let (section, command) = &found[at];
        let inner: Vec<_> =
            command.get_subcommands().map(|sub| (dotted(section, sub.get_name()), sub.clone())).collect();
        found.extend(inner);
        at += 1;
    }
    found
}

fn find<'a>(root: &'a Command, section: &str) -> &'a Command {
    section.split('.').filter(|name| !name.is_empty()).fold(root, |command, name| {
        command.find_subcommand(name).unwrap_or_else(|| panic!("no subcommand {name}"))
    })
}

#[test]
fn every_argument_has_a_variable_and_a_key() {
    let mut count = 0;
    for (section, sub) in &sections() {
        for arg in sub.get_arguments() {
            let flag = arg.get_long().expect("every argument is a long flag");
            let path = if section.is_empty() { flag.to_owned() } else { format!("{section}.{flag}") };
            let variable = format!("TOWLINE_{}", path.to_uppercase().replace(['-', '.'], "_"));
            assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(variable.as_str()));
            if flag == CONFIG {
                continue;
            }
            let word = sample(arg);
            let changed = with_text(command(), &toml_of(section, flag, &word))
                .unwrap_or_else(|error| panic!("{section}.{flag}: {error:#}"));
            let now = find(&changed, section).get_arguments().find(|now| now.get_id() == arg.get_id());
            let now = now.unwrap();
            assert_eq!(now.get_default_values(), [word.as_str()], "{section}.{flag}");
            assert!(!now.is_required_set(), "{section}.{flag} is still required on the command line");
            count += 1;
        }
    }
    assert!(count > 50, "only {count} arguments were walked");
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
    assert_eq!(error_of("repeat = 4"), "unknown key repeat; it belongs in [bench.kv]");
    assert_eq!(
        error_of("[bench.kv]\nrepeats = 4"),
        "unknown key bench.kv.repeats; the nearest known key is \"bench.kv.repeat\""
    );
    assert!(error_of("[wroker]\nthreads = 4").contains("the nearest known key is \"worker\""));
    assert!(error_of("config = 'other.toml'").starts_with("unknown key config"));
}

#[test]
fn errors_name_the_key_of_a_bad_value() {
    for (text, key, part) in [
        ("[worker]\nthreads = 'many'", "worker.threads", "invalid value 'many'"),
        ("[worker]\nthreads = 0", "worker.threads", "0 is not in"),
        ("[worker]\nthreads = [1, 2]", "worker.threads", "found array"),
        ("[worker]\ntransport = 'rdma'", "worker.transport", "[possible values: auto, shm, tcp, ucx]"),
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
