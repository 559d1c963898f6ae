//! Short printable text out of the kernel: it goes into cards, logs and metrics, so it is bounded and has no control
//! characters.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A name as the kernel gives it: 1 to 255 bytes of printable UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label(String);

/// Text that is no [`Label`]. Trying again does not help.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("a label is 1 to 255 bytes of printable text, this has {length_bytes} bytes and begins {begins:?}")]
pub struct LabelError {
    /// How long the text is, in bytes.
    pub length_bytes: usize,
    /// How it begins.
    pub begins: String,
}

impl Label {
    /// Longest label, in bytes: Linux's `NAME_MAX`; names of hosts, devices and interfaces are shorter.
    pub const LEN_MAX: usize = 255;

    /// Checks and takes text.
    ///
    /// # Errors
    /// [`LabelError`] when it is empty, too long or holds control characters.
    pub fn new(text: impl Into<String>) -> Result<Self, LabelError> {
        let text = text.into();
        let fits = (1..=Self::LEN_MAX).contains(&text.len()) && !text.chars().any(char::is_control);
        if fits {
            Ok(Self(text))
        } else {
            Err(LabelError { length_bytes: text.len(), begins: excerpt(&text) })
        }
    }

    /// A label that can stand as one part of a path, so that it leads nowhere else.
    pub(crate) fn part(text: &str) -> Option<Self> {
        let plain = !text.contains('/') && text != "." && text != "..";
        plain.then(|| Self::new(text).ok()).flatten()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Label {
    type Error = LabelError;

    fn try_from(text: String) -> Result<Self, LabelError> {
        Self::new(text)
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.0
    }
}

/// How a text begins: 48 characters at most, control characters as dots.
pub(crate) fn excerpt(text: &str) -> String {
    text.trim().chars().take(48).map(|c| if c.is_control() { '.' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_short_and_printable() {
        assert_eq!(Label::new("mlx5_0").unwrap().as_str(), "mlx5_0");
        assert!(Label::new("").is_err());
        assert!(Label::new("a\nb").is_err());
        assert!(Label::new("x".repeat(255)).is_ok());
        assert!(Label::new("x".repeat(256)).is_err());
        assert!(serde_json::from_str::<Label>("\"a\\u0007\"").is_err());
    }

    #[test]
    fn a_part_of_a_path_leads_nowhere_else() {
        assert!(Label::part("rxe0").is_some());
        for text in ["..", ".", "a/b", "", "/etc"] {
            assert!(Label::part(text).is_none(), "{text}");
        }
    }
}
