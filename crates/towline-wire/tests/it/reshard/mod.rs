//! Re-sharding against an oracle that fills, addresses and checks memory byte by byte, without the crate's help.

mod bytes;
mod counts;
mod models;
mod oracle;
mod refusals;
