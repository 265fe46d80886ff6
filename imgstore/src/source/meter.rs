//! Counts what was read and tells the caller now and then.

use std::fmt;

/// How far a source has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Names seen.
    pub entries: u64,
    /// Bytes of archive or of file sizes passed.
    pub bytes: u64,
}

/// Entries between two reports.
const REPORT_EVERY: u64 = 256;
/// Bytes between two reports.
const REPORT_EVERY_BYTES: u64 = 8 << 20;

/// The counters of one load.
pub(super) struct Meter<'a> {
    progress: Progress,
    reported: Progress,
    tell: Option<&'a (dyn Fn(Progress) + Send + Sync)>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(tell: Option<&'a (dyn Fn(Progress) + Send + Sync)>) -> Self {
        Self {
            progress: Progress::default(),
            reported: Progress::default(),
            tell,
        }
    }

    pub(super) fn count(&mut self, entries: u64, bytes: u64) {
        self.progress.entries += entries;
        self.progress.bytes = self.progress.bytes.saturating_add(bytes);
        let due = self.progress.entries - self.reported.entries >= REPORT_EVERY
            || self.progress.bytes - self.reported.bytes >= REPORT_EVERY_BYTES;
        if due {
            self.report();
        }
    }

    pub(super) fn report(&mut self) {
        self.reported = self.progress;
        if let Some(tell) = self.tell {
            tell(self.progress);
        }
    }
}

impl fmt::Debug for Meter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.progress.fmt(f)
    }
}
