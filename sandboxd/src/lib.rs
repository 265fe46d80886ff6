//! `sandboxd`: sandboxes composed of layers, and what runs in them.
//!
//! [`container`] is the first backend. The daemon asks layerd for layers over its socket, makes sandboxes of them, and serves
//! HTTP. See `docs/sandbox.md`.

pub mod container;
mod sys;
