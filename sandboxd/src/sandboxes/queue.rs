//! The queue of creates: a burst waits its turn, and holds up nothing else.
//!
//! A create blocks a thread while it waits for a shell, and other requests need such threads too; so only some creates have one at a
//! time. The rest wait here, first come first served. Both the queue and the waiting are bounded.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ApiError, ErrorKind};

/// Creates that are worked on at a time.
const WORKED_ON_MAX: usize = 32;
/// Creates that may wait, those that are worked on included.
const QUEUED_MAX: usize = 10_000;
/// How long one waits for its turn.
const PATIENCE: Duration = Duration::from_secs(300);

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Queue {
    places: Arc<Semaphore>,
    turns: Arc<Semaphore>,
}

/// A create's turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _place: OwnedSemaphorePermit,
    _turn: OwnedSemaphorePermit,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            places: Arc::new(Semaphore::new(QUEUED_MAX)),
            turns: Arc::new(Semaphore::new(WORKED_ON_MAX)),
        }
    }
}

impl Queue {
    /// Waits for a turn.
    ///
    /// # Errors
    /// `Unavailable` when the queue is full, or it takes too long.
    pub(super) async fn turn(&self) -> Result<Turn, ApiError> {
        let busy = |message: String| ApiError::new(ErrorKind::Unavailable, message);
        let place = Arc::clone(&self.places)
            .try_acquire_owned()
            .map_err(|_full| {
                busy(format!(
                    "{QUEUED_MAX} creates wait, the most that may; try again"
                ))
            })?;
        let turn = Arc::clone(&self.turns).acquire_owned();
        match tokio::time::timeout(PATIENCE, turn).await {
            Ok(Ok(turn)) => Ok(Turn {
                _place: place,
                _turn: turn,
            }),
            _ => Err(busy(format!(
                "others came first, for {PATIENCE:?}; try again"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: with a turn that is given back at once, more than the bound are worked on.
    #[tokio::test(flavor = "current_thread")]
    async fn a_burst_waits_and_nobody_is_refused_below_the_bound() {
        let queue = Arc::new(Queue::default());
        let mut turns = Vec::new();
        for _ in 0..WORKED_ON_MAX {
            turns.push(queue.turn().await.unwrap());
        }
        let waiting: Vec<_> = (0..QUEUED_MAX - WORKED_ON_MAX)
            .map(|_| {
                let queue = Arc::clone(&queue);
                tokio::spawn(async move { queue.turn().await.map(drop) })
            })
            .collect();
        // Each yield lets some of them run.
        for _ in 0..QUEUED_MAX {
            tokio::task::yield_now().await;
        }
        assert_eq!(queue.places.available_permits(), 0);
        assert!(waiting.iter().all(|one| !one.is_finished()));
        let refused = queue.turn().await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable);
        drop(turns);
        for one in waiting {
            one.await.unwrap().unwrap();
        }
        assert_eq!(queue.places.available_permits(), QUEUED_MAX);
    }
}
