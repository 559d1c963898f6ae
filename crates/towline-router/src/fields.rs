//! A JSON object one level deep: names, and values as the client wrote them.
//!
//! A router reads six fields of a body and passes on the rest, so the rest is never taken apart: numbers keep
//! their digits, order stays, and sixteen MiB of token ids stay sixteen MiB (parsed values would be half a GiB).

use std::fmt;

use serde::Deserializer;
use serde::de::{Deserialize, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

/// Most fields in one object: names are compared one by one, and no API has as many.
const FIELDS_MAX: usize = 256;

/// The fields of an object, in order. Of a name that comes twice the last value counts, at the first's place, as
/// in Python and JavaScript: worker and router must not read two different values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields(Vec<(String, Box<RawValue>)>);

impl Fields {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &RawValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), &**value))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(found, _)| found == name)
    }

    /// The JSON text of a field; absent and `null` are the same.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(found, _)| found == name)?;
        Some(value.get()).filter(|text| *text != "null")
    }

    /// Takes a field out; tells whether it was there.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|(found, _)| found != name);
        self.0.len() < before
    }

    pub(crate) fn set(&mut self, name: &str, value: Box<RawValue>) {
        match self.0.iter_mut().find(|(found, _)| found == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_owned(), value)),
        }
    }

    /// About how long the object is as text, bytes.
    pub(crate) fn size_bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.len() + value.get().len() + 4).sum()
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    fields.set(&name, value);
                    if fields.0.len() > FIELDS_MAX {
                        return Err(A::Error::custom(format!("more than {FIELDS_MAX} fields")));
                    }
                }
                Ok(fields)
            }
        }
        from.deserialize_map(Object)
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

/// The number of elements of a JSON array, counted without building them; none if the text is no array.
pub(crate) fn element_count(text: &str) -> Option<usize> {
    struct Count(usize);
    impl<'de> Deserialize<'de> for Count {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            struct Elements;
            impl<'de> Visitor<'de> for Elements {
                type Value = Count;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("an array")
                }

                fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Count, A::Error> {
                    let mut count = 0;
                    while elements.next_element::<IgnoredAny>()?.is_some() {
                        count += 1;
                    }
                    Ok(Count(count))
                }
            }
            from.deserialize_seq(Elements)
        }
    }
    serde_json::from_str::<Count>(text).ok().map(|count| count.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn values_stay_as_they_were_written() {
        let text = r#"{"z":1.50,"a":[1e3, 2],"big":123456789012345678901234567890,"s":"\u00e9"}"#;
        assert_eq!(serde_json::to_string(&fields(text)).unwrap(), text);
        assert!(fields(text).size_bytes() >= text.len() - 2);
    }

    #[test]
    fn last_of_two_values_counts_and_escaped_names_are_read() {
        let mut fields = fields(r#"{"a":1,"b":2,"\u0061":3,"n":null}"#);
        assert_eq!(fields.text("a"), Some("3"));
        assert_eq!((fields.text("n"), fields.has("n")), (None, true));
        assert!(fields.remove("a") && !fields.remove("a"));
        assert_eq!(serde_json::to_string(&fields).unwrap(), r#"{"b":2,"n":null}"#);
    }

    #[test]
    fn fields_are_bounded() {
        let many: Vec<_> = (0..=FIELDS_MAX).map(|i| format!("\"{i}\":0")).collect();
        assert!(serde_json::from_str::<Fields>(&format!("{{{}}}", many.join(","))).is_err());
    }

    #[test]
    fn elements_are_counted() {
        assert_eq!(element_count(r#"[ "a", ["b", "c"], {} ]"#), Some(3));
        assert_eq!(element_count("[]"), Some(0));
        assert_eq!(element_count("\"a\""), None);
    }
}
