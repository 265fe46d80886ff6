//! Threads that carry out the requests of one disk, which answers on the calling thread.
//!
//! What waits for them is bounded by the requests in flight, which the queues' depth bounds.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::handle::carry_out;
use crate::request::Request;

/// Contents may decompress on the thread.
const STACK_BYTES: usize = 512 << 10;

#[derive(Debug, Default)]
struct Waiting {
    requests: VecDeque<Request>,
    ending: bool,
}

/// See the head of this file. The threads end when the last reference to it is gone.
#[derive(Debug)]
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    work: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut buffer = Vec::new();
        let mut waiting = self.lock();
        loop {
            if let Some(request) = waiting.requests.pop_front() {
                drop(waiting);
                carry_out(&request, &mut buffer);
                drop(request);
                waiting = self.lock();
            } else if waiting.ending {
                return;
            } else {
                let woken = self.work.wait(waiting);
                waiting = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Workers {
    /// Starts `count` threads, at least one.
    ///
    /// # Errors
    /// When a thread is not to be had.
    pub(crate) fn start(count: usize) -> io::Result<Arc<Self>> {
        let workers = Self {
            shared: Arc::default(),
        };
        for _ in 0..count.max(1) {
            let shared = Arc::clone(&workers.shared);
            std::thread::Builder::new()
                .name("ublk-disk".to_owned())
                .stack_size(STACK_BYTES)
                .spawn(move || shared.work())?;
        }
        Ok(Arc::new(workers))
    }

    pub(crate) fn put(&self, request: Request) {
        self.shared.lock().requests.push_back(request);
        self.shared.work.notify_one();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.work.notify_all();
    }
}
