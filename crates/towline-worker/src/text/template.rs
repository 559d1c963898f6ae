//! Chat templates: Jinja from the model file, run with limits.
//!
//! The template is data of whoever published the model, so it gets no I/O, a step limit ([`FUEL`]) and a limit on what
//! it writes ([`PROMPT_BYTES_MAX`]). Whitespace rules and helpers are those of Hugging Face's `apply_chat_template`
//! (`trim_blocks`, `lstrip_blocks`, `raise_exception`, `strftime_now`, Python's string methods).

use std::collections::HashMap;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::quantized::gguf_file::Value as Metadata;
use minijinja::{Environment, Error, ErrorKind, context};
use thiserror::Error as ThisError;

use super::Tokenizer;

/// Steps a render may take: a conversation of a thousand messages takes some fifty thousand.
const FUEL: u64 = 5_000_000;
/// Bytes of a prompt: far more than any context holds.
const PROMPT_BYTES_MAX: usize = 16 << 20;
/// Bytes of a template: the longest in use have some twenty thousand.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;
const NAME: &str = "chat";

/// A model's chat template.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// The template of GGUF `metadata`, if it has one.
    ///
    /// # Errors
    /// [`TemplateError`] when it is no valid template.
    pub fn from_metadata(
        metadata: &HashMap<String, Metadata>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, TemplateError> {
        let Some(Metadata::String(source)) = metadata.get("tokenizer.chat_template") else { return Ok(None) };
        let text = |key: &str| {
            let id = metadata.get(key).and_then(|id| id.to_u32().ok());
            id.map(|id| tokenizer.decode(&[id], true)).unwrap_or_default()
        };
        Self::new(source, text("tokenizer.ggml.bos_token_id"), text("tokenizer.ggml.eos_token_id")).map(Some)
    }

    /// A template from its source and the texts of the tokens it may name.
    ///
    /// # Errors
    /// [`TemplateError`] when it is no valid template.
    pub fn new(source: &str, bos: String, eos: String) -> Result<Self, TemplateError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError::Size { bytes: source.len(), max: TEMPLATE_BYTES_MAX });
        }
        let mut environment = environment();
        environment.add_template_owned(NAME, source.to_owned()).map_err(TemplateError::syntax)?;
        Ok(Self { environment, bos, eos })
    }

    /// The prompt for `messages` (a list of objects with `role` and `content`), with the beginning of the assistant's
    /// turn if asked for.
    ///
    /// # Errors
    /// [`TemplateError::Refused`] when the template itself objects (`raise_exception`: roles out of order, say), with
    /// its words for the client; [`TemplateError::Render`] when it fails or meets a limit.
    pub fn render(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(TemplateError::syntax)?;
        let context = context! {
            messages => minijinja::value::Serde(messages),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let mut prompt = Limited(Vec::new());
        template.render_captured_to(context, &mut prompt).map_err(|error| TemplateError::render(&error))?;
        String::from_utf8(prompt.0).map_err(|error| TemplateError::Render { what: error.to_string() })
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    let mut syntax = environment.syntax().to_builder();
    if let Ok(syntax) = syntax.trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax); // fails only for clashing delimiters, and these are the default ones
    }
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |what: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSAL}{what}")))
    });
    environment.add_function("strftime_now", |format: &str| strftime(format, unix_now()));
    environment
}

/// Marks the template's own objections among the errors of the renderer.
const REFUSAL: &str = "refused: ";

/// A writer that ends a render which writes too much.
struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > PROMPT_BYTES_MAX {
            return Err(std::io::Error::other(format!("the prompt is longer than {PROMPT_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// `strftime` in UTC for the fields templates use; others stay as they are written.
fn strftime(format: &str, unix_seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = civil(days);
    let name = MONTHS.get(month.saturating_sub(1)).copied().unwrap_or_default();
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some('Y')) => out += &year.to_string(),
            ('%', Some('m')) => out += &format!("{month:02}"),
            ('%', Some('d')) => out += &format!("{day:02}"),
            ('%', Some('B')) => out += name,
            ('%', Some('b')) => out.extend(name.chars().take(3)),
            ('%', Some('H')) => out += &format!("{:02}", seconds / 3600),
            ('%', Some('M')) => out += &format!("{:02}", seconds / 60 % 60),
            ('%', Some('S')) => out += &format!("{:02}", seconds % 60),
            ('%', Some('%')) => out.push('%'),
            (c, next) => out.extend([Some(c), next].into_iter().flatten()),
        }
    }
    out
}

/// Year, month and day of a day since 1970-01-01, in the proleptic Gregorian calendar.
fn civil(days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while left >= lengths[month] {
        left -= lengths[month];
        month += 1;
    }
    (year, month + 1, left + 1)
}

/// Why a prompt could not be made.
#[derive(Clone, Debug, ThisError)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is larger than any in use.
    #[error("the template has {bytes} bytes, more than {max}")]
    Size {
        /// Its bytes.
        bytes: usize,
        /// Most allowed.
        max: usize,
    },
    /// The template doesn't parse; the model file is at fault.
    #[error("not a valid template: {what}")]
    Syntax {
        /// The parser's words.
        what: String,
    },
    /// The template objects to the messages; the caller is at fault.
    #[error("the model's chat template refuses the messages: {what}")]
    Refused {
        /// The template's words.
        what: String,
    },
    /// Rendering failed or met a limit.
    #[error("the model's chat template failed: {what}")]
    Render {
        /// The renderer's words.
        what: String,
    },
}

impl TemplateError {
    fn syntax(error: Error) -> Self {
        Self::Syntax { what: error.to_string() }
    }

    fn render(error: &Error) -> Self {
        match error.detail().and_then(|detail| detail.strip_prefix(REFUSAL)) {
            Some(what) => Self::Refused { what: what.into() },
            None => Self::Render { what: error.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: serde_json::Value) -> Result<String, TemplateError> {
        ChatTemplate::new(source, "<s>".into(), "</s>".into()).unwrap().render(&messages, true)
    }

    #[test]
    fn python_methods_and_both_tokens_work() {
        let source = "{{ bos_token }}{% for m in messages %}{{ m['role'].upper() }}: {{ m.content.strip() }}\n{% endfor %}{{ eos_token }}";
        let out = render(source, serde_json::json!([{"role": "user", "content": " hi "}])).unwrap();
        assert_eq!(out, "<s>USER: hi\n</s>");
    }

    #[test]
    fn an_objection_keeps_the_templates_words() {
        let error =
            render("{{ raise_exception('roles must alternate') }}", serde_json::json!([])).unwrap_err();
        assert!(matches!(error, TemplateError::Refused { what } if what == "roles must alternate"));
    }

    #[test]
    fn endless_and_huge_renders_end() {
        let slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let wide = "{% for a in range(9999) %}{{ messages[0] * 9999 }}{% endfor %}";
        for source in [slow, wide] {
            assert!(matches!(render(source, serde_json::json!(["xxxx"])), Err(TemplateError::Render { .. })));
        }
    }

    #[test]
    fn dates_are_the_calendars() {
        assert_eq!(strftime("%d %b %Y %H:%M:%S %%", 951_782_400 + 3_661), "29 Feb 2000 01:01:01 %");
        assert_eq!(strftime("%Y-%m-%d %B", 1_795_867_200), "2026-11-28 November");
        assert_eq!(strftime("%", 0), "%");
    }
}
