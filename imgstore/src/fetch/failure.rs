//! Kinds of failures, as counters and retries tell them apart.

use crate::origin::OriginError;
use crate::store::layer::LayerError;

/// What an origin did in place of answering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// It has no such object.
    NotFound,
    /// It cannot be reached, breaks off, or fails.
    Unavailable,
    /// It asks to be left alone for a while.
    Busy,
    /// It refuses who asks.
    Denied,
    /// Its answer is not what was asked for.
    WrongAnswer,
    /// What it has is not what the name stands for.
    Damaged,
    /// It cannot do this at all.
    Unsupported,
}

impl FailureKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::NotFound,
        Self::Unavailable,
        Self::Busy,
        Self::Denied,
        Self::WrongAnswer,
        Self::Damaged,
        Self::Unsupported,
    ];

    /// As a metric's label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Unavailable => "unavailable",
            Self::Busy => "busy",
            Self::Denied => "denied",
            Self::WrongAnswer => "wrong_answer",
            Self::Damaged => "damaged",
            Self::Unsupported => "unsupported",
        }
    }

    /// Whether the same request may be answered a moment later.
    pub const fn is_transient(self) -> bool {
        matches!(self, Self::Unavailable | Self::Busy | Self::WrongAnswer)
    }

    /// Whether it says something about the origin, and not about one object.
    pub const fn is_the_origins(self) -> bool {
        self.is_transient() || matches!(self, Self::Denied)
    }
}

/// An error of a request to an origin.
pub trait Failure: From<OriginError> {
    /// What kind it is of.
    fn kind(&self) -> FailureKind;
}

impl Failure for OriginError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NotFound { .. } => FailureKind::NotFound,
            Self::Unavailable { .. } => FailureKind::Unavailable,
            Self::Busy { .. } => FailureKind::Busy,
            Self::Denied { .. } => FailureKind::Denied,
            Self::WrongAnswer { .. } => FailureKind::WrongAnswer,
            Self::Unsupported { .. } => FailureKind::Unsupported,
        }
    }
}

impl Failure for LayerError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Origin(error) => error.kind(),
            Self::NoLayer { .. } => FailureKind::NotFound,
            Self::Damaged { .. } => FailureKind::Damaged,
        }
    }
}
