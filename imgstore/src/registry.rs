//! Talking to an OCI (or Docker) registry: what the `oci://` origin and `dsec import` have in common.
//!
//! `reference` says what a repository and an image are called, `credentials` and `tokens` who we are there, `client` sends
//! requests and never sends who we are to anyone else.

pub mod api;
pub(crate) mod body;
mod challenge;
pub mod client;
mod credentials;
mod error;
pub mod pull;
pub mod reference;
mod tokens;
pub mod upload;

pub use error::RegistryError;
