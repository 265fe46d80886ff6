//! Watchers that are asked now and then: events wait here until somebody takes them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::connect::RpcError;
use crate::container::link::{Event, Link};
use crate::container::watch::{Change, WatchEvent};
use crate::ids;

/// Watchers of one sandbox.
const WATCHERS_MAX: usize = 64;
/// Events of one watcher that nobody has taken yet.
const EVENTS_MAX: usize = 10_000;

/// What one watcher has seen.
#[derive(Debug, Default)]
struct Seen {
    events: Vec<WatchEvent>,
    /// Some were lost.
    overflown: bool,
}

#[derive(Debug)]
struct Watcher {
    sandbox: String,
    seen: Arc<Mutex<Seen>>,
    reader: tokio::task::AbortHandle,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    all: Mutex<HashMap<String, Watcher>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn missing(id: &str) -> RpcError {
    RpcError::new("not_found", format!("no watcher `{id}` in this sandbox"))
}

/// More happened than was kept.
pub(super) fn overflow() -> RpcError {
    RpcError::new(
        "resource_exhausted",
        "more happened than could be told: look anew, and watch again",
    )
}

impl Watchers {
    /// Keeps what comes from a watch, and names it.
    pub(super) fn add(&self, sandbox: &str, link: Link) -> Result<String, RpcError> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut all = locked(&self.all);
        // Those whose sandbox ended.
        all.retain(|_, watcher| !watcher.reader.is_finished());
        let of_sandbox = all
            .values()
            .filter(|watcher| watcher.sandbox == sandbox)
            .count();
        if of_sandbox >= WATCHERS_MAX {
            let message =
                format!("{WATCHERS_MAX} watchers, the most that may, look at this sandbox");
            return Err(RpcError::new("resource_exhausted", message));
        }
        let id = ids::random();
        let watcher = Watcher {
            sandbox: sandbox.to_owned(),
            reader: tokio::spawn(read(link, Arc::clone(&seen))).abort_handle(),
            seen,
        };
        all.insert(id.clone(), watcher);
        Ok(id)
    }

    /// What a watcher has seen since it was asked last.
    pub(super) fn take(&self, sandbox: &str, id: &str) -> Result<Vec<WatchEvent>, RpcError> {
        let all = locked(&self.all);
        let watcher = all
            .get(id)
            .filter(|w| w.sandbox == sandbox)
            .ok_or_else(|| missing(id))?;
        let seen = std::mem::take(&mut *locked(&watcher.seen));
        if seen.overflown {
            Err(overflow())
        } else {
            Ok(seen.events)
        }
    }

    /// Ends a watcher.
    pub(super) fn remove(&self, sandbox: &str, id: &str) -> Result<(), RpcError> {
        let mut all = locked(&self.all);
        if all.get(id).is_none_or(|w| w.sandbox != sandbox) {
            return Err(missing(id));
        }
        if let Some(watcher) = all.remove(id) {
            // The link goes with it, and the agent's end of it then.
            watcher.reader.abort();
        }
        Ok(())
    }
}

async fn read(mut link: Link, seen: Arc<Mutex<Seen>>) {
    while let Ok(Event::Data(bytes)) = link.next().await {
        let mut seen = locked(&seen);
        match serde_json::from_slice::<WatchEvent>(&bytes) {
            Ok(event) if event.change != Change::Overflow && seen.events.len() < EVENTS_MAX => {
                seen.events.push(event);
            }
            _ => {
                seen.events.clear();
                seen.overflown = true;
            }
        }
    }
}

/// An event as envd tells it.
pub(super) fn event(event: &WatchEvent) -> Value {
    let kind = match event.change {
        Change::Create => "EVENT_TYPE_CREATE",
        Change::Write => "EVENT_TYPE_WRITE",
        Change::Remove => "EVENT_TYPE_REMOVE",
        Change::Rename => "EVENT_TYPE_RENAME",
        Change::Chmod => "EVENT_TYPE_CHMOD",
        Change::Overflow => "EVENT_TYPE_UNSPECIFIED",
    };
    json!({"name": event.name, "type": kind})
}
