//! What a trajectory is made of. Field names are a contract: clients read them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One entry of a sandbox's trajectory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Event {
    /// Its place in the order: 1, 2, 3, … without gaps.
    pub seq: u64,
    /// Milliseconds since 1970 when it was written down.
    pub at_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// What an entry tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// Something was asked for; written before anything is done about it.
    Request {
        /// Its name: the same name is never carried out twice.
        request_id: String,
        /// What was asked.
        #[serde(flatten)]
        asked: Asked,
    },
    /// What became of a request.
    Result(Finished),
    /// The sandbox ended.
    Ended {
        /// Why.
        reason: String,
    },
}

/// A request, as it can be sent again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Asked {
    /// HTTP's method.
    pub method: String,
    /// The path below the sandbox's, with its query.
    pub path: String,
    /// The body, if it was JSON.
    pub body: Option<Value>,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Finished {
    /// Number of the request.
    pub of: u64,
    /// Whether it was done.
    pub outcome: Outcome,
    /// HTTP's status.
    pub status: u16,
    /// The answer.
    pub reply: Value,
    /// The body, if it was bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<Upload>,
}

/// Whether a request was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = TrajectoryOutcome)]
pub enum Outcome {
    /// It was carried out, or refused for good: the same request gets the same answer.
    Done,
    /// It was not begun, or left nothing: it may be sent again.
    NotDone,
    /// Nobody knows: the daemon ended while it was carried out.
    Unknown,
}

/// A body of bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Upload {
    /// How many.
    pub bytes: u64,
    /// Their BLAKE3 digest.
    pub digest: String,
    /// Whether they are kept, to be sent again.
    pub kept: bool,
}

/// `GET /v1/sandboxes/ID/trajectory`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct TrajectoryReply {
    /// In order.
    pub events: Vec<Event>,
    /// Where the rest begins, if there is more.
    pub next: Option<u64>,
}
