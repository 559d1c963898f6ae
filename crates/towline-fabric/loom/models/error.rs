//! Stands in for `src/error.rs`: of the ways in which a session ends, those that the models use.

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SessionError {
    Lost(String),
    Closed(&'static str),
}
