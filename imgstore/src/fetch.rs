//! Bringing stored frames from the origins: which ranges to ask for, whom, how often, and in which order.
//!
//! [`plan`] joins neighbouring segments into ranges, [`origins`] asks the origins in order and retries with jitter until a
//! deadline, [`health`] remembers which of them fail, [`queue`] runs ranges on a bounded number of threads, demand before prefetch, each segment once at a time.
//! Nothing here looks into a frame: verification is the part of whoever decodes it.

mod ahead;
mod circuit;
pub mod failure;
pub mod health;
pub mod latency;
pub mod origins;
pub mod pace;
mod pause;
pub mod plan;
pub mod queue;
