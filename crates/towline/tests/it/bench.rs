//! `towline bench` as a user meets it: real processes on loopback, tiny sizes, and no bar on any speed.

use std::path::Path;
use std::process::Output;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{Process, children, eventually, finish, towline};

/// The smallest sweep that still has pages.
const TINY: [&str; 6] =
    ["--size=1MiB", "--block=4KiB", "--repeat=2", "--format=json", "--log=warn", "--copy-threads=2"];

fn bench(folder: &Path, words: &[&str]) -> Output {
    finish(towline(&[&["bench", "kv"][..], words].concat(), folder))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The JSON lines of a run that must have exited with `code`.
fn lines(output: &Output, code: i32) -> Vec<Value> {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
}

fn rows(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| line["kind"] == "row").collect()
}

fn run(words: &[&str]) -> Vec<Value> {
    lines(&bench(TempDir::new().unwrap().path(), &[&TINY[..], words].concat()), 0)
}

#[test]
fn a_sweep_prints_a_checked_row_for_each_wire_and_direction() {
    let lines = run(&["--transport=shm,tcp", "--op=read,write"]);
    assert_eq!((&lines[0]["kind"], &lines[0]["schema"]), (&"machine".into(), &1.into()));
    assert!(lines[0]["version"].is_string() && lines[0]["cores"].as_u64() >= Some(1), "{}", lines[0]);
    let rows = rows(&lines);
    let cases: Vec<_> = rows.iter().map(|row| [&row["transport"], &row["op"]]).collect();
    assert_eq!(cases, [["shm", "read"], ["shm", "write"], ["tcp", "read"], ["tcp", "write"]]);
    for start in lines.iter().filter(|line| line["kind"] == "start") {
        for step in ["agent_ms", "connect_ms", "first_ms"] {
            assert!(
                start[step].as_f64() > Some(0.0) && start[step].as_f64() <= start["total_ms_max"].as_f64()
            );
        }
    }
    assert_eq!(lines.iter().filter(|line| line["kind"] == "start").count(), 2, "one a wire");
    for row in rows {
        for field in ["gb_per_s", "limit_gb_per_s", "cpu_s_per_gb", "p50_us", "p99_us", "share_of_limit"] {
            assert!(row[field].as_f64() > Some(0.0), "{field} in {row}");
        }
        assert!(row["limit"]["gb_per_s_median"].as_f64() <= row["limit_gb_per_s"].as_f64(), "{row}");
        match (&row["cma"]["note"], row["cma_gb_per_s"].as_f64()) {
            (Value::Null, None) => assert_eq!(row["transport"], "tcp", "{row}"),
            // A sandbox may forbid it.
            (why, None) => {
                assert!(why.as_str().unwrap().contains("process_vm"), "{row}");
                crate::skips::note("cross-memory attach", why.as_str().unwrap());
            }
            (_, rate) => assert!(rate > Some(0.0) && row["transport"] == "shm", "{row}"),
        }
        let ways = row["limit"]["ways"].as_array().unwrap();
        assert_eq!(ways.len(), 2, "both kinds of stores, or of socket buffers: {row}");
        assert!(ways.iter().any(|way| way["how"] == row["limit"]["note"]), "{row}");
        for stage in ["prepare_us", "post_us", "wire_us", "total_us"] {
            assert!(row[stage]["p50"].as_f64() <= row[stage]["p99"].as_f64(), "{stage} in {row}");
        }
        assert_eq!((&row["size_bytes"], &row["block_bytes"]), (&(1 << 20).into(), &4096.into()));
        assert_eq!((&row["descriptors"], &row["verified"]), (&256.into(), &"full".into()));
        assert!(
            row["descriptors_merged"].as_u64() <= Some(256) && row["descriptors_merged"].as_u64() > Some(200)
        );
        let receipt = &row["receipt"];
        assert_eq!((&receipt["transport"], &receipt["op"]), (&row["transport"], &row["op"]));
        assert_eq!(
            (&receipt["bytes"], &receipt["evidence"]["class"]),
            (&(1 << 20).into(), &"library-exact".into())
        );
        assert_eq!(row["rails"].as_u64(), receipt["rails"].as_array().map(|rails| rails.len() as u64));
    }
}

#[test]
fn contiguous_sizes_batches_and_many_peers_are_measured() {
    let folder = TempDir::new().unwrap();
    let of = |words: &[&str]| {
        let common = ["--repeat=1", "--format=json"];
        let lines = lines(&bench(folder.path(), &[&common[..], words].concat()), 0);
        rows(&lines).into_iter().cloned().collect::<Vec<Value>>()
    };
    let sizes = of(&["--size=4KiB,256KiB", "--batch=1,3"]);
    assert_eq!(sizes.len(), 8);
    assert!(sizes.iter().all(|row| row["block_bytes"].is_null() && row["descriptors_merged"] == 1));
    for pattern in ["many-to-one", "one-to-many"] {
        let pattern_flag = format!("--pattern={pattern}");
        let found = of(&[
            &pattern_flag,
            "--peers=3",
            "--batch=2",
            "--size=128KiB",
            "--block=4KiB",
            "--op=read,write",
        ]);
        assert_eq!(found.len(), 4);
        assert!(found.iter().all(|row| row["pattern"] == pattern && row["peers"] == 3), "{found:?}");
    }
    let model = of(&["--model=smollm2-135m", "--isl=40", "--transport=shm"]);
    assert_eq!(
        (&model[0]["size_bytes"], &model[0]["block_bytes"]),
        (&(3 * 16 * 23_040).into(), &(16 * 23_040).into())
    );
    let in_order = of(&["--size=256KiB", "--block=4KiB", "--order=contiguous", "--verify=off"]);
    assert!(in_order.iter().all(|row| row["descriptors"] == 64 && row["descriptors_merged"] == 1));
    assert!(in_order.iter().all(|row| row["verified"] == "off"));
}

#[test]
fn prompts_are_moved_between_engines_of_other_ranks_and_checked() {
    let words = ["--model=smollm2-135m", "--isl=48", "--repeat=1", "--format=json", "--log=warn"];
    let folder = TempDir::new().unwrap();
    let of = |more: &[&str]| lines(&bench(folder.path(), &[&words[..], more].concat()), 0);
    let found = of(&["--reshard=tp3:tp1,tp3pp2:tp1-nhd", "--op=read,write"]);
    let found = rows(&found);
    assert_eq!(found.len(), 8);
    for row in found {
        assert_eq!((&row["pattern"], &row["verified"]), (&"reshard".into(), &"full".into()));
        assert_eq!(row["size_bytes"].as_u64(), Some(48 * 23_040), "{row}");
        assert!(row["limit_gb_per_s"].as_f64() > Some(0.0), "{row}");
        // Layers x K and V x blocks, for each rank and head that has a place of its own; a token's as well in NHD.
        let pieces = if row["reshard"] == "tp3:tp1" { 3 * 30 * 2 * 3 } else { 3 * 30 * 2 * 48 };
        assert_eq!(row["descriptors"].as_u64(), Some(pieces), "{row}");
        assert!(row["descriptors_merged"].as_u64() <= Some(pieces), "{row}");
    }
    let equal = of(&["--reshard=tp1:tp1", "--transport=shm", "--order=contiguous"]);
    assert_eq!(
        (&rows(&equal)[0]["descriptors"], &rows(&equal)[0]["descriptors_merged"]),
        (&3.into(), &1.into())
    );
}

#[test]
fn people_get_a_table_and_a_chart() {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), &["--size=64KiB", "--repeat=1", "--transport=shm", "--svg=chart.svg"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "cores, Linux",
        "an agent's start over shm",
        "CMA",
        "CPU s/GB",
        "shm read 64KiB",
        "verified",
        "LibraryExact from mapping",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    let chart = std::fs::read_to_string(folder.path().join("chart.svg")).unwrap();
    assert!(chart.contains("shm read 64KiB"), "{chart}");
}

#[test]
fn bad_usage_exits_2_and_says_what_to_do() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("empty.json"), "").unwrap();
    let refused: &[(&[&str], &str)] = &[
        (&["--size=1MB", "--block=4KiB"], "not whole blocks"),
        (&["--size=huge"], "for example 512MiB"),
        (&["--transport=rdma"], "invalid value 'rdma'"),
        (&["--pattern=many-to-one", "--peers=65"], "65 is not in"),
        (&["--repeat=0"], "0 is not in"),
        (&["--order=random"], "needs --block"),
        (&["--model=gpt-9"], "invalid value 'gpt-9'"),
        (&["--reshard=tp4"], "write FROM:TO"),
        (&["--reshard=tp4:tp1"], "give --model"),
        (&["--reshard=tp2:tp1", "--model=smollm2-135m"], "3 KV heads, which 2 ranks"),
        (&["--size=1TiB"], "give a smaller --size"),
        (&["--baseline=empty.json"], "in the baseline empty.json"),
        (&["--baseline=absent.json"], "can't read the baseline absent.json"),
        (&["--listen=127.0.0.1:0"], "TOWLINE_CLUSTER_KEY"),
        (&["--connect=127.0.0.1:1"], "TOWLINE_CLUSTER_KEY"),
        (&["--connect=127.0.0.1:1", "--listen=127.0.0.1:0"], "give one of them"),
    ];
    for (words, part) in refused {
        let output = bench(folder.path(), words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", said(&output));
        assert!(said(&output).contains(part), "{words:?}: {}", said(&output));
    }
}

#[test]
fn slower_than_the_baseline_exits_1() {
    let folder = TempDir::new().unwrap();
    let words = [&TINY[..], &["--transport=shm", "--baseline=before.json"]].concat();
    let baseline = |factor: f64| {
        let mut lines = run(&["--transport=shm"]);
        let row = lines.iter_mut().find(|line| line["kind"] == "row").unwrap();
        row["gb_per_s"] = (row["gb_per_s"].as_f64().unwrap() * factor).into();
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(folder.path().join("before.json"), text.join("\n")).unwrap();
    };
    baseline(1e6);
    let output = bench(folder.path(), &words);
    let found = lines(&output, 1);
    let comparison = found.last().unwrap();
    assert_eq!(
        (&comparison["kind"], &comparison["changes"][0]["regression"]),
        (&"comparison".into(), &true.into())
    );
    assert!(said(&output).contains("slower than the baseline"), "{}", said(&output));
    baseline(1e-6);
    assert_eq!(lines(&bench(folder.path(), &words), 0).last().unwrap()["changes"][0]["regression"], false);
    let other = bench(folder.path(), &["--size=4KiB", "--repeat=1", "--baseline=before.json"]);
    assert_eq!(other.status.code(), Some(2));
    assert!(said(&other).contains("nothing was compared"), "{}", said(&other));
}

/// A process that listens, and its address.
fn listening(folder: &Path) -> (Process, String) {
    let words = ["bench", "kv", "--listen=127.0.0.1:0", "--cluster-key-file=key"];
    let process = Process::start(towline(&words, folder));
    let line = process.line_with("listening on ");
    let address = line.rsplit(' ').next().unwrap().to_owned();
    (process, address)
}

#[test]
fn two_processes_with_one_key_measure_together_and_strangers_are_refused() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("key"), "1f".repeat(32)).unwrap();
    std::fs::write(folder.path().join("other"), "2e".repeat(32)).unwrap();
    let (mut serving, address) = listening(folder.path());
    let connect = format!("--connect={address}");
    for op in ["--op=read", "--op=write"] {
        let words = [&TINY[..], &[&connect, "--cluster-key-file=key", op]].concat();
        let found = lines(&bench(folder.path(), &words), 0);
        assert_eq!(rows(&found).len(), 2);
        assert!(
            rows(&found).iter().all(|row| row["limit_gb_per_s"].is_f64() && row["cpu_s_per_gb"].is_f64())
        );
    }
    let many = [&TINY[..], &[&connect, "--cluster-key-file=key", "--pattern=one-to-many"]].concat();
    assert_eq!(rows(&lines(&bench(folder.path(), &many), 0)).len(), 2);
    let stranger = bench(folder.path(), &[&TINY[..], &[&connect, "--cluster-key-file=other"]].concat());
    assert_eq!(stranger.status.code(), Some(2));
    assert!(said(&stranger).contains("can't reach the owner"), "{}", said(&stranger));
    serving.signal(Signal::INT);
    assert!(serving.end().success(), "{}", serving.said());
}

#[test]
fn no_owner_outlives_a_killed_sweep() {
    let folder = TempDir::new().unwrap();
    let words = [
        "bench",
        "kv",
        "--size=1MiB",
        "--repeat=100000",
        "--pattern=many-to-one",
        "--peers=2",
        "--format=json",
    ];
    let mut sweep = Process::start(towline(&words, folder.path()));
    eventually("the owners run", || children(sweep.pid()).len() == 2);
    let owners = children(sweep.pid());
    sweep.signal(Signal::KILL);
    sweep.end();
    assert!(owners.iter().all(|owner| owner.ends()), "an owner was left behind");
}

#[test]
fn owners_have_no_key_among_their_arguments() {
    let folder = TempDir::new().unwrap();
    let words = ["bench", "kv", "--size=1MiB", "--repeat=100000", "--format=json"];
    let sweep = Process::start(towline(&words, folder.path()));
    eventually("the owner runs", || !children(sweep.pid()).is_empty());
    let owner = children(sweep.pid()).remove(0);
    eventually("it is this binary", || owner.words().iter().any(|word| word == "--stop-with-parent"));
    let long = |word: &String| word.len() >= 64 && word.chars().all(|c| c.is_ascii_hexdigit() || c == '=');
    assert!(!owner.words().iter().any(long), "{:?}", owner.words());
}
