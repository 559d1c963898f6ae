//! The command line as a user meets it: what is said, where, and with which exit code.

use std::process::Output;

use tempfile::TempDir;

use crate::process::{finish, towline};

/// Runs the binary in a folder of its own, so that no configuration file is found by chance.
fn run(args: &[&str]) -> Output {
    run_in(&TempDir::new().unwrap(), args)
}

fn run_in(folder: &TempDir, args: &[&str]) -> Output {
    finish(towline(args, folder.path()))
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Fails with exit code 2, says `parts` on standard error and nothing on standard output.
fn refuses(output: &Output, parts: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty(), "standard output is for results");
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing in:\n{said}");
    }
}

#[test]
fn help_and_version_succeed_on_standard_output() {
    for args in [
        &["--help"][..],
        &["-h"],
        &["--version"],
        &["up", "--help"],
        &["worker", "-h"],
        &["help", "router"],
        &["bench", "kv", "-h"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn help_fits_a_screen() {
    let output = run(&["--help"]);
    let lines = String::from_utf8(output.stdout).unwrap().lines().count();
    assert!(lines <= 50, "{lines} lines");
}

#[test]
fn usage_errors_exit_2_and_name_the_word() {
    refuses(&run(&[]), &["Usage"]);
    refuses(&run(&["frobnicate"]), &["unrecognized subcommand 'frobnicate'"]);
    refuses(&run(&["worker", "--modle", "x"]), &["unexpected argument '--modle'", "--model"]);
    refuses(&run(&["worker"]), &["--role <ROLE>", "--model <FILE>"]);
    refuses(&run(&["worker", "--role", "both", "--model", "x"]), &["invalid value 'both'", "prefill"]);
    refuses(&run(&["up", "--model", "x", "--max-tokens", "0"]), &["--max-tokens", "0 is not in"]);
    refuses(&run(&["up", "--model", "x", "--kv-cache", "1.5 gigs"]), &["--kv-cache", "512MiB"]);
}

#[test]
fn listen_address_needs_a_host() {
    let example = "for example 127.0.0.1:8000";
    for address in [":0", "8000", "localhost:8000"] {
        refuses(&run(&["router", "--listen", address]), &[&format!("invalid value '{address}'"), example]);
    }
}

#[test]
fn missing_model_is_named() {
    refuses(&run(&["up", "--model", "nowhere.gguf"]), &["no model at nowhere.gguf", "make model"]);
    refuses(&run(&["worker", "--role", "aggregated", "--model", "nowhere.gguf"]), &["nowhere.gguf"]);
}

#[test]
fn file_that_is_no_model_is_refused() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("text.gguf"), "not a model").unwrap();
    let output = run_in(&folder, &["worker", "--role", "aggregated", "--model", "text.gguf"]);
    refuses(&output, &["error: ", "because: "]);
    let output = run_in(&folder, &["up", "--model", "text.gguf"]);
    refuses(&output, &["worker ended (exit status: 2)", "its last lines were"]);
}

#[test]
fn worker_of_a_pair_needs_the_key() {
    let output = run(&["worker", "--role", "decode", "--model", "m.gguf"]);
    refuses(&output, &["--cluster-key-file", "TOWLINE_CLUSTER_KEY"]);
}

#[test]
fn bad_key_is_refused_and_not_repeated() {
    let folder = TempDir::new().unwrap();
    let secret = "0123456789abcdef-not-a-key";
    std::fs::write(folder.path().join("key"), secret).unwrap();
    let args = ["worker", "--role", "decode", "--model", "m.gguf", "--cluster-key-file", "key"];
    let output = run_in(&folder, &args);
    refuses(&output, &["in the key file key"]);
    assert!(!stderr(&output).contains(secret));
    let output = {
        let mut command = towline(&args[..5], folder.path());
        command.env("TOWLINE_CLUSTER_KEY", secret);
        finish(command)
    };
    refuses(&output, &["in TOWLINE_CLUSTER_KEY"]);
    assert!(!stderr(&output).contains(secret));
}

#[test]
fn router_without_workers_is_refused() {
    refuses(&run(&["router"]), &["no workers", "--prefill URL"]);
    refuses(&run(&["router", "--prefill", "http://127.0.0.1:1"]), &["no workers"]);
    refuses(&run(&["router", "--prefill", "https://a:1"]), &["workers are reached over http"]);
}

#[test]
fn configuration_file_errors_name_file_and_key() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("towline.toml");
    std::fs::write(&file, "[worker]\nthread = 4\n").unwrap();
    let by_default = run_in(&folder, &["router"]);
    refuses(&by_default, &["towline.toml", "unknown key worker.thread", "worker.threads"]);
    std::fs::write(&file, "[router]\nlisten = 8000\n").unwrap();
    refuses(&run_in(&folder, &["router"]), &["towline.toml", "key router.listen", "8000"]);
    std::fs::write(&file, "[router\n").unwrap();
    refuses(&run_in(&folder, &["router"]), &["towline.toml", "not TOML"]);
    let help = run_in(&folder, &["--help"]);
    assert_eq!(help.status.code(), Some(0), "help works beside a broken file");
    refuses(&run(&["--config", "absent.toml", "router"]), &["can't read the configuration file absent.toml"]);
}

#[test]
fn flag_wins_over_variable_and_variable_over_file() {
    let folder = TempDir::new().unwrap();
    let said = |args: &[&str], variable: Option<&str>| {
        let mut command = towline(args, folder.path());
        command.envs(variable.map(|value| ("TOWLINE_ROUTER_PREFILL", value)));
        stderr(&finish(command))
    };
    std::fs::write(
        folder.path().join("towline.toml"),
        "[router]\nprefill = 'http://127.0.0.1:1'\nmax-requests = 7\n",
    )
    .unwrap();
    assert!(said(&["router"], Some("ftp://variable")).contains("ftp://variable"));
    assert!(
        said(&["router", "--prefill", "gopher://flag"], Some("ftp://variable")).contains("gopher://flag")
    );
    assert!(said(&["router"], None).contains("no workers"), "the file's prefill alone is no pair");
}

#[test]
fn taken_port_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = run(&["router", "--aggregated", "http://127.0.0.1:1", "--listen", &address]);
    refuses(&output, &[&address, "is taken"]);
}

#[test]
fn bad_log_filter_is_refused() {
    refuses(&run(&["--log", "=loud=", "router", "--aggregated", "http://127.0.0.1:1"]), &["--log", "level"]);
}
