//! Reading one fact after another, with the gaps collected on the way.

use crate::gap::{Gap, Gaps, Reason};
use crate::label::Label;
use crate::system::System;

/// A system, and what it could not tell so far.
pub(crate) struct Reader<'a> {
    pub(crate) system: &'a dyn System,
    pub(crate) gaps: Gaps,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(system: &'a dyn System) -> Self {
        Self { system, gaps: Gaps::default() }
    }

    /// The text of a file without the white space around it.
    fn text(&self, path: &str) -> Result<String, Gap> {
        let text = self.system.read(path)?.trim().to_owned();
        if text.is_empty() { Err(Gap::new(path, Reason::Unset)) } else { Ok(text) }
    }

    /// What `parse` makes of a file's text; a gap if it makes nothing of it.
    pub(crate) fn field<T>(
        &mut self,
        path: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let value = self
            .text(path)
            .and_then(|text| parse(&text).ok_or_else(|| Gap::unparsable(path, expected, &text)));
        self.gaps.keep(value)
    }

    /// As [`Self::field`], for a file that identifies the machine: its text stays out of the gap.
    pub(crate) fn secret<T>(
        &mut self,
        path: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let withheld = |_| Gap::unparsable(path, expected, "(withheld)");
        let value = self.text(path).and_then(|text| parse(&text).ok_or(()).map_err(withheld));
        self.gaps.keep(value)
    }

    /// A file that holds a name.
    pub(crate) fn label(&mut self, path: &str) -> Option<Label> {
        self.field(path, "a short printable name", |text| Label::new(text).ok())
    }

    /// What `parse` makes of where a link points to.
    pub(crate) fn link<T>(
        &mut self,
        path: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let target = self.system.link(path);
        let value =
            target.and_then(|target| parse(&target).ok_or_else(|| Gap::unparsable(path, expected, &target)));
        self.gaps.keep(value)
    }

    /// The names in a folder; none, and a gap, if it can't be listed.
    pub(crate) fn list(&mut self, path: &str) -> Vec<String> {
        let names = self.system.list(path);
        self.gaps.keep(names).unwrap_or_default()
    }

    /// The numbers that name the entries of a folder, ascending; an entry named otherwise is a gap.
    pub(crate) fn numbers(&mut self, path: &str) -> Vec<u32> {
        let mut numbers = Vec::new();
        for name in self.list(path) {
            match name.parse::<u32>() {
                Ok(number) if number.to_string() == name => numbers.push(number),
                _ => self.gaps.push(Gap::unparsable(path, "entries named by numbers", &name)),
            }
        }
        numbers.sort_unstable();
        numbers
    }
}
