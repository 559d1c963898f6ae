//! Deployments of real processes, with a tiny random model that the tests write: no download, seconds each.
//!
//! Every wait has a deadline, every port is the kernel's choice, and every process dies with its fixture.

mod cluster;
mod contract;
mod faults;
mod fixture;
mod handoff;
mod http;
mod lifecycle;
mod midway;
mod real_model;
mod transfers;
mod valve;
