//! What is asked of the kernel: EROFS and overlay mounts, and what is mounted where. No decisions.

pub(crate) mod mount;
pub(crate) mod mountinfo;
