//! What `towline-wire` promises through its public face.

#![expect(clippy::unwrap_used, reason = "in a test's helpers too, what fails should stop the test")]
#![expect(clippy::print_stdout, reason = "traces, statistics and seeds are for whoever runs the tests")]

mod fuzz;
mod random;
mod reshard;
mod simulation;

/// What the environment asks for: more seeds, or one.
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, not a number")))
}
