//! Serves images to the kernel as block devices, `/dev/ublkbN`, through the kernel's ublk driver.
//!
//! ```text
//! kernel ── request ──► loop thread (one ring for many queues) ──► content: answers now, later, or on a worker
//!    ▲                        ▲                                              │
//!    └── commit ──────────────┴──── mailbox, eventfd ◄── bytes copied into the request (`pread`/`pwrite` on ublkcN)
//! ```
//! What is served is a [`Content`]; [`Driver`] owns the threads, [`Device`] is one device. The kernel interface is written down
//! in `wire`; requests that need `unsafe` are in `sys`. Needs Linux 6.5 (`UBLK_F_USER_COPY`) and root.

mod content;
mod control;
mod device;
mod error;
mod event_loop;
mod found;
mod handle;
mod options;
mod probe;
mod request;
mod sys;
mod wire;
mod workers;

pub use content::Content;
pub use device::{Device, Driver};
pub use error::UblkError;
pub use found::{Found, State, delete, devices};
pub use options::{Options, Recovery};
pub use probe::{WhyNot, probe};
