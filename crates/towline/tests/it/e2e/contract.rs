//! The contract, end to end: what a decode worker does about a path that is less than it was told to require.

use super::cluster::{Cluster, Spec};
use super::fixture::Bench;
use super::http::{chat, get, metric};

const HELLO: &str = "Hello, who are you and what do you do all day?";

#[test]
fn a_path_of_another_kind_is_refused_and_the_log_says_what_to_do() {
    let bench = Bench::new();
    let strict = Spec::with(&["--transport=tcp", "--require=same-host"]);
    let cluster = Cluster::start(&bench, &Spec::default(), &strict);
    let answer = chat(&cluster.url, HELLO);
    assert!((500..600).contains(&answer.status), "{answer:?}\n{}", cluster.said());
    answer.error();
    let said = cluster.decode.log_with("requires SameHost");
    assert!(said.contains("mount the same socket directory"), "{said}");
    assert_eq!(metric(&cluster.decode_url, "towline_contract_violations_total", ""), 1.0);
    assert_eq!(get(&cluster.decode_url, "/health").status, 200);
}

#[test]
fn under_an_alarm_the_path_is_used_and_the_receipt_says_what_it_breaks() {
    let bench = Bench::new();
    let lenient = Spec::with(&["--transport=tcp", "--require=same-host", "--on-violation=alarm"]);
    let cluster = Cluster::start(&bench, &Spec::default(), &lenient);
    let answer = chat(&cluster.url, HELLO);
    assert_eq!(answer.status, 200, "{answer:?}\n{}", cluster.said());
    let receipt = answer.json()["usage"]["towline_receipt"].clone();
    assert_eq!(receipt["transport"], "tcp");
    assert!(receipt["violation"].as_str().is_some_and(|text| text.contains("SameHost")), "{receipt}");
    assert_eq!(metric(&cluster.decode_url, "towline_contract_violations_total", ""), 1.0);
}
