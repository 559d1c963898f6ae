//! The locks of what threads hand each other. `loom/` compiles the files that take them from here a second time, with
//! loom's in their place, and runs those files through every interleaving of a few threads.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
