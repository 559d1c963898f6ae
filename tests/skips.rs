//! What could not be checked here is said, never passed over: a line in the file that `TOWLINE_SKIPS` names.

use std::fs::OpenOptions;
use std::io::Write;

/// Notes that `check` was skipped. `scripts/test.sh` prints the table.
#[expect(clippy::print_stderr, reason = "a person who runs the tests sees it")]
pub(crate) fn note(check: &str, reason: &str) {
    eprintln!("skipped: {check}: {reason}");
    let Some(file) = std::env::var_os("TOWLINE_SKIPS") else { return };
    let mut file = OpenOptions::new().append(true).create(true).open(file).expect("the list of skips opens");
    // One write for one line: test processes append side by side.
    file.write_all(format!("{check}\t{reason}\n").as_bytes()).expect("the list of skips takes a line");
}
