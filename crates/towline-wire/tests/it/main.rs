//! What `towline-wire` promises through its public face.

#![expect(clippy::unwrap_used, reason = "in a test's helpers too, what fails should stop the test")]

mod reshard;
