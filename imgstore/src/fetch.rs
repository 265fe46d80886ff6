//! Bringing stored frames from the origins: which ranges to ask for, whom, how often, and in which order.
//!
//! [`plan`] joins neighbouring segments into ranges, [`origins`] asks the origins in order and retries with jitter until a
//! deadline, [`queue`] runs ranges on a bounded number of threads, demand before prefetch, each segment once at a time.
//! Nothing here looks into a frame: verification is the part of whoever decodes it.

pub mod origins;
pub mod pace;
pub mod plan;
pub mod queue;
