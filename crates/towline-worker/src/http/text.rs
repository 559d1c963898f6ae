//! The model's tokenizer and chat template, as the front uses them.

use std::sync::Arc;

use serde_json::json;

use super::messages::Message;
use super::request::Text;
use crate::model::Model;
use crate::text::{ChatTemplate, Tokenizer};

/// A model's [`Text`].
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// Of `model`, which then may go into the engine.
    pub fn new(model: &Model) -> Self {
        Self { tokenizer: Arc::clone(model.tokenizer()), template: model.template().cloned() }
    }
}

impl Text for ModelText {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let tokens = self.tokenizer.encode(text, true).map_err(|error| error.to_string())?;
        Ok(self.tokenizer.bos_to_add().into_iter().chain(tokens).collect())
    }

    fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, String> {
        let template = self.template.as_ref();
        let template = template.ok_or("this model has no chat template: use /v1/completions")?;
        let turn = |message: &Message| json!({"role": message.role, "content": message.content});
        let messages = messages.iter().map(turn).collect();
        let prompt = template.render(&messages, true).map_err(|error| error.to_string())?;
        // Templates write the beginning-of-text token themselves.
        self.tokenizer.encode(&prompt, true).map_err(|error| error.to_string())
    }

    fn token(&self, id: u32) -> String {
        self.tokenizer.decode(&[id], true)
    }

    fn vocab(&self) -> usize {
        self.tokenizer.vocab()
    }
}
