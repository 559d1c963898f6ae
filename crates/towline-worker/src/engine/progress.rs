//! Who is told how a prompt's KV comes to be, while it does: a handoff that lends it before it is complete.
//!
//! Told in this order, by the engine's thread, which computes nothing meanwhile:
//!
//! ```text
//!  handle_started ─→ handle_layers(1) ─→ handle_layers(2) ─→ … ─→ handle_layers(all)
//!        ↑                  │ preempted: the blocks are taken away
//!        └──────── handle_stopped
//! ```
//!
//! A prompt that is computed in several steps (chunks, or others decode beside it) has its layers told in the last one:
//! before that, no layer has the KV of all its tokens. Cost where nobody asked: one branch a sequence and step.

use std::fmt::Debug;

use crate::pool::Blocks;

/// Hears of one job's prompt. Dropped with the job, whatever ends it; answer at once, the engine waits.
pub trait KvProgress: Debug + Send {
    /// The prompt's blocks are there, the last one perhaps for less than its tokens, and will hold its KV. `blocks`
    /// shares them. Those of a cached or loaded beginning are complete already.
    fn handle_started(&mut self, blocks: Blocks);

    /// The first `layers` layers of the model hold the KV of all tokens of the prompt, stored before this call.
    fn handle_layers(&mut self, layers: usize);

    /// The engine takes the blocks away to compute the prompt anew in others; unless all layers were told, what was
    /// lent of them must be taken back before this returns.
    fn handle_stopped(&mut self);
}
