//! One leg: an aggregated worker computes the prompt and writes the tokens.

use crate::State;
use crate::error::LegError;
use crate::plan::{Call, Retry, Writing, ask_writer, leg_body, second};
use crate::pool::Held;

/// Asks `held`, and another aggregated worker if `held` can't be reached.
pub(super) async fn run(state: &State, call: &Call, held: Held) -> Result<Writing, LegError> {
    let body = leg_body::aggregated(&call.request);
    let error = match ask_writer(state, call, &held, body.clone()).await {
        Ok(response) => return Ok(Writing { response, held }),
        Err(error) => error,
    };
    let Some(held) = second(state, call, held, &error, Retry::Repeatable) else { return Err(error) };
    let response = ask_writer(state, call, &held, body).await?;
    Ok(Writing { response, held })
}
