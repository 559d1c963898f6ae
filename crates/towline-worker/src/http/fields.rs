//! A request's JSON object, taken apart field by field.
//!
//! **Why it exists.** A derived decoder stops at "invalid type at line 1 column 80"; a client needs the field's name and
//! what it may hold. Each field is taken out of the map, so that what is left at the end is what this server
//! does not know: refused, never ignored, because an option that silently does nothing gives wrong answers.

use serde_json::{Map, Value};

use super::error::{ApiError, cut};

/// What is left of the request. `null` counts as absent everywhere, as in OpenAI's libraries.
#[derive(Debug)]
pub(super) struct Fields {
    map: Map<String, Value>,
}

impl Fields {
    /// Reads a body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map }),
            Ok(other) => Err(ApiError::Json { detail: format!("it is {}", kind(&other)) }),
            Err(error) => Err(ApiError::Json { detail: error.to_string() }),
        }
    }

    /// Takes a field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field that must be there.
    pub(super) fn require(&mut self, name: &str, what: &str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| ApiError::Field {
            param: name.into(),
            code: "missing_required_parameter",
            message: format!("{name} is missing: give {what}"),
        })
    }

    /// Takes a truth value.
    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", |value| value.as_bool())
    }

    /// Takes a string.
    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// Takes a whole number of any sign. `3.0` is none: it is more likely a mistake than a wish.
    pub(super) fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        self.typed(name, "a whole number", |value| {
            value.as_i64().or_else(|| value.is_u64().then_some(i64::MAX))
        })
    }

    /// Takes a number.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        self.typed(name, "a number", |value| value.as_f64())
    }

    fn typed<T>(
        &mut self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| wrong_type(name, wanted, &value))
    }

    /// Refuses what nobody took.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        let unknown = self.map.into_iter().find(|(_, value)| !value.is_null());
        unknown.map_or(Ok(()), |(name, _)| {
            let name = cut(&name, 80);
            Err(ApiError::Field {
                param: name.into(),
                code: "unknown_parameter",
                message: format!("unrecognised parameter {name:?}"),
            })
        })
    }
}

/// The error for a value of another type.
pub(super) fn wrong_type(param: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError::Field {
        param: param.into(),
        code: "invalid_type",
        message: format!("{param} must be {wanted}, not {}", kind(found)),
    }
}

/// What JSON calls a value.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a fraction",
        Value::Number(_) => "a whole number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_took_is_refused_by_name() {
        let mut fields = Fields::parse(br#"{"a": 1, "b": null, "c": 2}"#).unwrap();
        assert_eq!(fields.integer("a").unwrap(), Some(1));
        let error = fields.finish().unwrap_err();
        assert_eq!((error.code(), error.body().error.param.as_deref()), ("unknown_parameter", Some("c")));
    }

    #[test]
    fn null_is_absent_and_huge_numbers_stay_positive() {
        let mut fields = Fields::parse(br#"{"a": null, "b": 18446744073709551615}"#).unwrap();
        assert_eq!(fields.integer("a").unwrap(), None);
        assert_eq!(fields.integer("b").unwrap(), Some(i64::MAX));
        fields.finish().unwrap();
    }

    #[test]
    fn deep_nesting_is_an_error_not_a_crash() {
        let deep = format!("{{\"a\":{}", "[".repeat(100_000));
        assert_eq!(Fields::parse(deep.as_bytes()).unwrap_err().code(), "invalid_json");
    }
}
