//! What models the workers list, merged for `GET /v1/models` and for refusing requests nobody could answer.
//!
//! A worker's own entry is cut down to fields that say something to a client; file paths stay behind.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::pool::Pool;

/// One entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Model {
    pub(crate) id: String,
    #[serde(default = "kind")]
    object: String,
    #[serde(default)]
    created: u64,
    #[serde(default = "owner")]
    owned_by: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u64>,
}

fn kind() -> String {
    "model".to_owned()
}

fn owner() -> String {
    "towline".to_owned()
}

impl Model {
    #[cfg(test)]
    pub(crate) fn named(id: &str) -> Self {
        Self { id: id.to_owned(), object: kind(), created: 0, owned_by: owner(), max_model_len: None }
    }
}

/// `{"object": "list", "data": [...]}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listing {
    #[serde(default)]
    object: String,
    pub(crate) data: Vec<Model>,
}

/// Every model some worker listed, once; the first worker's entry stands.
pub(crate) fn merged(pool: &Pool) -> Listing {
    let mut seen = HashSet::new();
    let mut data = Vec::new();
    for (_, worker) in pool.workers() {
        for model in worker.models().iter().flat_map(|models| models.iter()) {
            if seen.insert(model.id.clone()) {
                data.push(model.clone());
            }
        }
    }
    Listing { object: "list".to_owned(), data }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::WorkerId;
    use crate::config::Config;

    #[test]
    fn listing_is_merged_without_duplicates_or_paths() {
        let url = |port: u16| format!("http://127.0.0.1:{port}").parse().unwrap();
        let pool =
            Pool::new(&Config { prefill: vec![url(1)], decode: vec![url(2), url(3)], ..Config::default() });
        let text = r#"{"object":"list","data":[{"id":"a","object":"model","created":7,"owned_by":"vllm",
            "root":"/models/secret","max_model_len":4096,"permission":[]},{"id":"b"}]}"#;
        let listing: Listing = serde_json::from_str(text).unwrap();
        pool.worker(WorkerId(0)).set_models(listing.data.clone());
        pool.worker(WorkerId(1)).set_models(listing.data);
        let json = serde_json::to_string(&merged(&pool)).unwrap();
        assert_eq!(json.matches(r#""id":"a""#).count(), 1);
        assert!(json.contains(r#""max_model_len":4096"#) && json.contains(r#""id":"b","object":"model""#));
        assert!(!json.contains("secret"));
    }
}
