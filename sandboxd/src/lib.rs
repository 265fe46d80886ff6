//! `sandboxd`: sandboxes composed of layers, and what runs in them.
//!
//! [`server`] is the HTTP API, [`sandboxes`] what it asks for, [`layers`] what sandboxes stand on (asked of layerd), [`store`]
//! what is on disk, [`trajectory`] what was asked and done, [`network`] what they may reach, [`backend`] the seam to what sandboxes
//! are made of, [`container`] its first kind. See `docs/sandbox.md`.

pub mod api;
pub mod backend;
pub mod container;
pub mod daemon;
pub mod disk;
pub mod error;
pub mod faults;
mod ids;
pub mod keys;
pub mod layers;
mod metrics;
pub mod network;
pub mod sandboxes;
mod secret;
pub mod server;
pub mod store;
mod sys;
pub mod trajectory;
