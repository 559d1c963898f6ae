//! Stop strings.
//!
//! An answer ends before the first of the caller's strings to be complete, which may come in pieces: the end of what has
//! been generated is held back while it could be the beginning of one. What is held is shorter than the longest string, so
//! the delay is bounded.

/// Watches one answer for its stop strings.
#[derive(Clone, Debug)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
    done: bool,
}

/// Whether the answer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// No string has been met.
    No,
    /// One has; what follows it is dropped.
    Yes,
}

impl StopStrings {
    /// For one answer; empty strings are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings = strings.into_iter().filter(|string| !string.is_empty()).collect();
        Self { strings, held: String::new(), done: false }
    }

    /// Takes generated text; returns what may be shown, and whether a stop string has ended the answer.
    pub fn push(&mut self, text: &str) -> (String, Stopped) {
        if self.done {
            return (String::new(), Stopped::Yes);
        }
        self.held.push_str(text);
        if let Some(at) = self.first_match() {
            self.held.truncate(at);
            self.done = true;
            return (std::mem::take(&mut self.held), Stopped::Yes);
        }
        let keep = self.held_back();
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), Stopped::No)
    }

    /// Ends the answer for another reason: what was held back is text after all.
    pub fn finish(&mut self) -> String {
        self.done = true;
        std::mem::take(&mut self.held)
    }

    /// Where the string begins that is complete first; of several that end together, the one that begins first. A string
    /// that began earlier and ends later does not count: whether its end comes in the same piece must not matter.
    fn first_match(&self) -> Option<usize> {
        let found = |string: &String| self.held.find(string.as_str()).map(|at| (at + string.len(), at));
        self.strings.iter().filter_map(found).min().map(|(_, at)| at)
    }

    /// Bytes at the end that begin a stop string.
    fn held_back(&self) -> usize {
        let overlap = |string: &String| {
            let longest = (string.len() - 1).min(self.held.len());
            // Bytes suffice: where a string's beginning matches, both are cut at the same character boundary.
            (1..=longest)
                .rev()
                .find(|len| self.held.as_bytes().ends_with(&string.as_bytes()[..*len]))
                .unwrap_or(0)
        };
        let bytes = self.strings.iter().map(overlap).max().unwrap_or(0);
        let start = self.held.floor_char_boundary(self.held.len() - bytes);
        self.held.len() - start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_stop_where_the_whole_would(
            text in "[ab<é>]{0,24}",
            stops in proptest::collection::vec("[ab<é>]{1,4}", 0..3),
            cuts in proptest::collection::vec(1usize..4, 0..24),
        ) {
            let found = |stop: &String| text.find(stop.as_str()).map(|at| (at + stop.len(), at));
            let expected = stops.iter().filter_map(found).min().map(|(_, at)| at);
            let mut watch = StopStrings::new(stops);
            let (mut out, mut stopped, mut chars) = (String::new(), Stopped::No, text.chars().peekable());
            let mut cuts = cuts.into_iter();
            while chars.peek().is_some() {
                let piece: String = chars.by_ref().take(cuts.next().unwrap_or(1)).collect();
                let (shown, now) = watch.push(&piece);
                out += &shown;
                stopped = now;
            }
            out += &watch.finish();
            prop_assert_eq!(stopped == Stopped::Yes, expected.is_some());
            prop_assert_eq!(out, text.get(..expected.unwrap_or(text.len())).unwrap());
        }
    }

    #[test]
    fn a_string_that_is_complete_ends_the_answer_though_a_longer_one_began_before() {
        for pieces in [vec!["a>éé"], vec!["a>é", "é"], vec!["a", ">", "é", "é"]] {
            let mut watch = StopStrings::new([">éé".to_owned(), "é".to_owned()]);
            let shown: String = pieces.into_iter().map(|piece| watch.push(piece).0).collect();
            assert_eq!(shown, "a>");
        }
    }

    #[test]
    fn a_false_start_is_let_go() {
        let mut watch = StopStrings::new(["</end>".to_owned()]);
        assert_eq!(watch.push("a</en"), ("a".into(), Stopped::No));
        assert_eq!(watch.push("try"), ("</entry".into(), Stopped::No));
        assert_eq!(watch.push(" </"), (" ".into(), Stopped::No));
        assert_eq!(watch.push("end> more"), (String::new(), Stopped::Yes));
        assert_eq!(watch.push("more"), (String::new(), Stopped::Yes));
    }
}
