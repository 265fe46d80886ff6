//! Names of execs that ended and whose results are not kept any more: they ran, so they must not run again.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// Names that are known to have run; 32 KiB. Above that the oldest are no longer told from those that never ran.
const NAMES_MAX: usize = 4096;

/// See the head of this file. Hashes: two names with one hash err to the safe side.
#[derive(Debug, Default)]
pub(super) struct Forgotten {
    hashes: VecDeque<u64>,
    lost: bool,
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

impl Forgotten {
    pub(super) fn add(&mut self, name: &str) {
        if self.hashes.len() >= NAMES_MAX {
            self.hashes.pop_front();
            self.lost = true;
        }
        self.hashes.push_back(hash(name));
    }

    /// Whether an exec of this name ran, or may have: `asked_before` says that somebody may have asked for it earlier.
    pub(super) fn may_have_run(&self, name: &str, asked_before: bool) -> bool {
        (asked_before && self.lost) || self.hashes.contains(&hash(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: without `lost`, the last assertion fails.
    #[test]
    fn what_ran_is_never_taken_for_new() {
        let mut forgotten = Forgotten::default();
        forgotten.add("a");
        assert!(forgotten.may_have_run("a", false));
        assert!(!forgotten.may_have_run("b", true));
        for n in 0..NAMES_MAX {
            forgotten.add(&n.to_string());
        }
        assert!(!forgotten.may_have_run("new", false));
        assert!(forgotten.may_have_run("a", true));
    }
}
