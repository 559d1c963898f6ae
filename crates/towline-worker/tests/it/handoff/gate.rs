//! A model that stops between layers, so that a test can say what happens while one is not computed yet.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use towline_worker::engine::Forward;
use towline_worker::model::{ForwardError, KvCache, Logits, Model, Sequence};
use towline_worker::text::Tokenizer;

/// Longer than any test's wait should ever be.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Lets layers through.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Layers that may be left behind; the model stops after storing the next one.
    allowed: usize,
    /// Layers whose KV is stored, of the pass under way.
    stored: usize,
    broken: bool,
}

impl Gate {
    /// The model may go on until it has stored `layers + 1` layers.
    pub(crate) fn allow(&self, layers: usize) {
        self.state.lock().unwrap().allowed = layers;
        self.changed.notify_all();
    }

    /// The model panics where it stands.
    pub(crate) fn break_down(&self) {
        self.state.lock().unwrap().broken = true;
        self.changed.notify_all();
    }

    /// Layers whose KV is stored.
    pub(crate) fn stored(&self) -> usize {
        self.state.lock().unwrap().stored
    }

    /// The KV of `layer` is stored: waits until the test lets the model compute on.
    fn pass(&self, layer: usize) {
        let mut state = self.state.lock().unwrap();
        state.stored = layer + 1;
        let shut = |state: &mut State| state.allowed <= layer && !state.broken;
        let (state, timeout) = self.changed.wait_timeout_while(state, PATIENCE, shut).unwrap();
        let broken = state.broken;
        drop(state);
        assert!(!timeout.timed_out(), "the test never opened the gate");
        assert!(!broken, "a model that panics, as the test wants");
    }
}

/// A model behind a gate.
pub(crate) struct Gated {
    pub(crate) model: Model,
    pub(crate) gate: Arc<Gate>,
}

impl Forward for Gated {
    fn context_tokens(&self) -> usize {
        self.model.context_tokens()
    }

    fn vocab(&self) -> usize {
        self.model.vocab()
    }

    fn step_tokens(&self) -> usize {
        Forward::step_tokens(&self.model)
    }

    fn tokenizer(&self) -> &Arc<Tokenizer> {
        Forward::tokenizer(&self.model)
    }

    fn forward(
        &mut self,
        cache: &KvCache,
        batch: &[Sequence<'_>],
        stored: &mut dyn FnMut(usize),
    ) -> Result<Vec<Option<Logits>>, ForwardError> {
        let Self { model, gate } = self;
        model.forward_by_layer(cache, batch, &mut |layer| {
            stored(layer);
            gate.pass(layer);
        })
    }
}
