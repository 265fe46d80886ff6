//! What can be chosen about a build, and its bounds.

use std::sync::Arc;
use std::time::Duration;

use super::error::BuildError;
use crate::format::manifest::SEGMENT_BYTES_MAX;
use crate::ids::{BLOCK_SIZE, Digest};
use crate::store::lease::hold::PATIENCE;

/// The unit of deduplication in bytes. `docs/benchmarks.md` has the table it was chosen from.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// The usual size of a segment in bytes, chosen from the same table.
pub const SEGMENT_BYTES: u64 = 256 << 10;
/// Zstd level of stored segments.
pub const LEVEL: i32 = 3;
/// A dictionary's segment is referred to if at least this share of it is used.
pub const DICT_SHARE_PERCENT: u64 = 50;

/// Which part of a build is running, for progress bars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Reading and hashing files.
    Scan,
    /// Compressing and writing segments.
    Store,
    /// Reading everything back.
    ReadBack,
}

/// How far a phase is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The phase.
    pub phase: Phase,
    /// Bytes done and in all.
    pub bytes: (u64, u64),
    /// Files done and in all; segments while storing.
    pub items: (u64, u64),
}

/// Called now and then with how far the build is, from several threads.
pub type Progress = Arc<dyn Fn(Step) + Send + Sync>;

/// The order in which files are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileOrder {
    /// By kind of file (its ending), then by path: what is read together lies together.
    Kind,
    /// By path alone; kept for the comparison in `docs/benchmarks.md`.
    Path,
}

/// Options of a build. All but `threads`, `gc_patience` and `progress` are part of what gives the layer its name.
#[derive(Clone)]
pub struct BuildOptions {
    /// Usual segment size in bytes: a power of two, 128 KiB to 4 MiB.
    pub segment_bytes: u64,
    /// Deduplication unit in bytes: a power of two, 4 KiB to 256 KiB.
    pub chunk_bytes: u64,
    /// Zstd level.
    pub level: i32,
    /// File order.
    pub order: FileOrder,
    /// Layers to refer to, first choice first.
    pub dict: Vec<Digest>,
    /// Least share of a dictionary's segment that must be used, in percent.
    pub dict_share_percent: u64,
    /// Worker threads.
    pub threads: usize,
    /// How long to wait for a collection that is about to remove what the layer needs.
    pub gc_patience: Duration,
    /// Progress callback.
    pub progress: Option<Progress>,
}

impl std::fmt::Debug for BuildOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BuildOptions")
            .field("segment_bytes", &self.segment_bytes)
            .field("chunk_bytes", &self.chunk_bytes)
            .field("level", &self.level)
            .field("dict", &self.dict)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            segment_bytes: SEGMENT_BYTES,
            chunk_bytes: CHUNK_BYTES,
            level: LEVEL,
            order: FileOrder::Kind,
            dict: Vec::new(),
            dict_share_percent: DICT_SHARE_PERCENT,
            threads: std::thread::available_parallelism().map_or(2, std::num::NonZero::get),
            gc_patience: PATIENCE,
            progress: None,
        }
    }
}

impl BuildOptions {
    /// Checks the bounds.
    ///
    /// # Errors
    /// [`BuildError::Option`] names the option and its bounds.
    pub fn check(&self) -> Result<(), BuildError> {
        let bad = |option, expected, found: u64| {
            Err(BuildError::Option {
                option,
                expected,
                found,
            })
        };
        if !self.segment_bytes.is_power_of_two()
            || !(128 << 10..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes)
        {
            return bad(
                "segment size",
                "a power of two from 128 KiB to 4 MiB",
                self.segment_bytes,
            );
        }
        let chunk_max = self.segment_bytes.min(256 << 10);
        if !self.chunk_bytes.is_power_of_two()
            || !(BLOCK_SIZE..=chunk_max).contains(&self.chunk_bytes)
        {
            return bad(
                "chunk size",
                "a power of two from 4 KiB to 256 KiB, at most the segment size",
                self.chunk_bytes,
            );
        }
        if self.dict_share_percent > 100 {
            return bad(
                "dictionary share",
                "0 to 100 percent",
                self.dict_share_percent,
            );
        }
        if self.threads == 0 || self.threads > 256 {
            return bad("threads", "1 to 256", crate::ids::to_u64(self.threads));
        }
        Ok(())
    }

    pub(crate) fn report(&self, step: Step) {
        if let Some(progress) = &self.progress {
            progress(step);
        }
    }
}
