//! layerd's socket: what is sent over it, and a small blocking client.
//!
//! HTTP/1.1 with JSON bodies over a unix socket, so that `curl --unix-socket` works too. [`api`] holds the requests and
//! replies, [`client`] sends them.

pub mod api;
pub mod cache;
pub mod client;
