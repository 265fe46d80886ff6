//! What goes wrong, in the form that every interface shows: a kind that says what to do, and words for people.

use serde::{Deserialize, Serialize};

use crate::backend::BackendError;
use crate::container::link::LinkError;
use crate::container::protocol::Failure;
use crate::disk::DiskError;
use crate::network::NetworkError;
use crate::trajectory::TrajectoryError;

/// What the caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request itself is wrong.
    Invalid,
    /// No or a wrong API key.
    Unauthenticated,
    /// No such sandbox, exec, file or layer.
    NotFound,
    /// Something is already there, or in another state.
    Conflict,
    /// A limit of the sandbox or of its disk is reached.
    Exhausted,
    /// No room now, or layerd cannot be reached; try again.
    Unavailable,
    /// The sandbox has ended. It does not come back.
    SandboxGone,
    /// The sandbox's own file system or kernel refused.
    Refused,
    /// Our own machinery failed.
    InfraFailed,
    /// The request was begun, and nobody knows what became of it. It is never carried out again by itself.
    UnknownOutcome,
}

/// The body of every error reply.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, utoipa::ToSchema,
)]
#[error("{message}")]
pub struct ApiError {
    /// What to do about it.
    pub kind: ErrorKind,
    /// What happened, for people.
    pub message: String,
}

impl ApiError {
    /// An error of a kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// The HTTP status that stands for the kind.
    pub fn status(&self) -> u16 {
        match self.kind {
            ErrorKind::Invalid => 400,
            ErrorKind::Unauthenticated => 401,
            ErrorKind::NotFound => 404,
            ErrorKind::Conflict | ErrorKind::UnknownOutcome => 409,
            ErrorKind::SandboxGone => 410,
            ErrorKind::Refused => 422,
            ErrorKind::InfraFailed => 500,
            ErrorKind::Unavailable => 503,
            ErrorKind::Exhausted => 507,
        }
    }
}

impl From<BackendError> for ApiError {
    fn from(error: BackendError) -> Self {
        let kind = match &error {
            BackendError::Unknown { .. } => ErrorKind::Invalid,
            BackendError::Lacks { .. } => ErrorKind::Refused,
            BackendError::Busy { .. } | BackendError::Full { .. } | BackendError::Closed { .. } => {
                ErrorKind::Unavailable
            }
            BackendError::Gone { .. } => ErrorKind::SandboxGone,
            BackendError::Link(LinkError::Refused { .. }) => ErrorKind::Invalid,
            BackendError::Link(_) | BackendError::Own(_) => ErrorKind::InfraFailed,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<LinkError> for ApiError {
    fn from(error: LinkError) -> Self {
        let kind = match &error {
            LinkError::Gone(_) => ErrorKind::SandboxGone,
            LinkError::Silent(_) | LinkError::Protocol(_) => ErrorKind::InfraFailed,
            LinkError::Refused { failure, .. } => match failure {
                Failure::Invalid => ErrorKind::Invalid,
                Failure::NotFound => ErrorKind::NotFound,
                Failure::Conflict => ErrorKind::Conflict,
                Failure::Exhausted => ErrorKind::Exhausted,
                Failure::Refused => ErrorKind::Refused,
                Failure::Internal => ErrorKind::InfraFailed,
                Failure::Forgotten => ErrorKind::UnknownOutcome,
            },
        };
        Self::new(kind, error.to_string())
    }
}

impl From<DiskError> for ApiError {
    fn from(error: DiskError) -> Self {
        let full = matches!(&error, DiskError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull);
        let kind = match (&error, full) {
            (_, true) => ErrorKind::Exhausted,
            (DiskError::NoDevice, _) => ErrorKind::Unavailable,
            _ => ErrorKind::InfraFailed,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<NetworkError> for ApiError {
    fn from(error: NetworkError) -> Self {
        let kind = match &error {
            NetworkError::Rule(_) => ErrorKind::Invalid,
            NetworkError::Io { .. } => ErrorKind::InfraFailed,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<TrajectoryError> for ApiError {
    fn from(error: TrajectoryError) -> Self {
        let kind = match &error {
            TrajectoryError::Differs { .. } => ErrorKind::Conflict,
            TrajectoryError::Full { .. } => ErrorKind::Exhausted,
            TrajectoryError::BadId { .. } => ErrorKind::Invalid,
            _ => ErrorKind::InfraFailed,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<layerd_client::client::ClientError> for ApiError {
    fn from(error: layerd_client::client::ClientError) -> Self {
        use layerd_client::api::ErrorKind as Layerd;
        let kind = match &error {
            layerd_client::client::ClientError::Refused(refused) => match refused.kind {
                Layerd::Invalid => ErrorKind::Invalid,
                Layerd::NotFound => ErrorKind::NotFound,
                Layerd::Unavailable | Layerd::Conflict => ErrorKind::Unavailable,
                _ => ErrorKind::InfraFailed,
            },
            _ => ErrorKind::Unavailable,
        };
        Self::new(kind, error.to_string())
    }
}
