//! Tokens to text as they come.
//!
//! A token may end in the middle of a character, and a client must never see half of one. [`Decoder`] keeps the bytes
//! of an unfinished character (at most 3) until the next token, and lets everything else go at once. The text of all
//! pushes and the finish equals the text decoded at once.

use super::Tokenizer;

/// Turns one answer's tokens into text.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    pending: Vec<u8>,
}

impl Decoder {
    /// For one answer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a token; returns the text that is now certain, often a word, sometimes nothing. Special tokens give nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if tokenizer.is_special(id) { String::new() } else { self.push_bytes(tokenizer.token_bytes(id)) }
    }

    /// Takes bytes; returns the text that is now certain. What can no longer become a character is U+FFFD.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let unfinished = self.pending.len() - unfinished_len(&self.pending);
        let rest = self.pending.split_off(unfinished);
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending = rest;
        text
    }

    /// Ends the answer: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Bytes at the end that begin a character and could still become one.
fn unfinished_len(bytes: &[u8]) -> usize {
    for len in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - len..];
        // Only a tail that starts a character is "unexpected end"; anything else is complete or wrong for good.
        if let Err(error) = std::str::from_utf8(tail)
            && error.valid_up_to() == 0
            && error.error_len().is_none()
        {
            return len;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_give_the_text_of_the_whole(text in "\\PC{0,40}", cuts in proptest::collection::vec(1usize..6, 0..60)) {
            let mut decoder = Decoder::new();
            let (mut rest, mut out) = (text.as_bytes(), String::new());
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                let piece = decoder.push_bytes(head);
                prop_assert!(!piece.contains(char::REPLACEMENT_CHARACTER) || text.contains(char::REPLACEMENT_CHARACTER));
                out += &piece;
                rest = tail;
            }
            out += &decoder.push_bytes(rest);
            out += &decoder.finish();
            prop_assert_eq!(out, text);
        }

        #[test]
        fn any_bytes_give_what_they_give_at_once(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let mut decoder = Decoder::new();
            let mut out: String = bytes.iter().map(|byte| decoder.push_bytes(&[*byte])).collect();
            out += &decoder.finish();
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes).into_owned());
        }
    }

    #[test]
    fn at_most_three_bytes_wait() {
        let mut decoder = Decoder::new();
        assert_eq!(decoder.push_bytes("a😀".as_bytes().split_at(4).0), "a");
        assert_eq!(decoder.pending.len(), 3);
        assert_eq!(decoder.push_bytes(b"x"), "\u{fffd}x");
    }
}
