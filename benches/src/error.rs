//! Why a benchmark stopped: what was being done, to what, and what happened instead.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// A failure that ends the benchmark. A way of running that cannot work here (no `dsec` binary, say) is
/// reported in the table instead.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file operation failed.
    #[error("cannot {what} `{path}`: {source}", path = path.display())]
    File {
        /// What was tried, as in "read".
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A program ended with an error.
    #[error("`{command}` failed ({status}): {stderr}")]
    Program {
        /// The command line.
        command: String,
        /// How it ended.
        status: String,
        /// The end of what it said on standard error.
        stderr: String,
    },
    /// Another thing went wrong.
    #[error("{what}: {source}")]
    Other {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// What was found is not what the benchmark needs; the text says both.
    #[error("{0}")]
    Unexpected(String),
}

/// Result of a benchmark step.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Adds what was being done to an error.
pub(crate) trait Context<T> {
    /// Wraps the error as a failed operation on a file.
    fn on(self, what: &'static str, path: &Path) -> Result<T>;
    /// Wraps the error with a description of the step.
    fn during(self, what: impl Display) -> Result<T>;
}

impl<T, E> Context<T> for std::result::Result<T, E>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn on(self, what: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| Error::File {
            what,
            path: path.to_owned(),
            source: std::io::Error::other(error),
        })
    }

    fn during(self, what: impl Display) -> Result<T> {
        self.map_err(|error| Error::Other {
            what: what.to_string(),
            source: error.into(),
        })
    }
}
