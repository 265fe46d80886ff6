//! A thread with one ring that carries the commands of many queues.
//!
//! Queues are given to it and answers come to it through its mailbox; a bell (an eventfd that the ring polls) is rung only
//! while the thread sleeps in the kernel. It asks contents that answer in their own time directly, and hands everything
//! else to the device's workers: it never waits for a disk.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use io_uring::IoUring;
use rustix::event::EventfdFlags;
use rustix::thread::CapabilitySet;

use crate::handle;
use crate::request::{EIO, Queue};
use crate::sys::{Descs, push_io, push_poll};
use crate::wire;
use crate::workers::Workers;

/// Submissions that fit into the ring before it has to be emptied.
const SUBMISSIONS: u32 = 256;
/// Completions that fit before the kernel keeps them elsewhere.
const COMPLETIONS: u32 = 4096;
/// Completions handled before the mailbox is looked at again.
const BATCH_MAX: usize = 256;
/// The name of the bell's poll. All others are a queue's key and a tag.
const BELL: u64 = u64::MAX;
const TAG_BITS: u32 = 16;
/// A thread that only translates and asks; contents that answer directly need some for decoding.
const STACK_BYTES: usize = 512 << 10;

/// Something for the thread to do.
enum Mail {
    /// Serve a queue; says when every tag has been offered to the kernel.
    Serve(Serve),
    /// The request of a queue's tag is answered.
    Answer(u64, u16, i32),
    /// End when there are no queues.
    End,
}

/// A queue to serve.
pub(crate) struct Serve {
    pub(crate) queue: Arc<Queue>,
    pub(crate) descs: Descs,
    pub(crate) workers: Option<Arc<Workers>>,
    /// Whether the kernel may look for partitions.
    pub(crate) partitions: bool,
    pub(crate) offered: mpsc::SyncSender<io::Result<()>>,
    /// Dropped when the kernel has taken all tags back.
    pub(crate) _alive: Arc<()>,
}

/// Where others leave what the thread is to do. Bounded by the requests in flight.
pub(crate) struct Mailbox {
    mail: Mutex<VecDeque<Mail>>,
    asleep: AtomicBool,
    bell: OwnedFd,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mailbox").finish_non_exhaustive()
    }
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Mail>> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, mail: Mail) {
        self.lock().push_back(mail);
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Err(error) = rustix::io::write(&self.bell, &1_u64.to_le_bytes())
            && error != rustix::io::Errno::AGAIN
        {
            tracing::error!(%error, "a thread of the ublk driver cannot be woken");
        }
    }

    pub(crate) fn serve(&self, serve: Serve) {
        self.put(Mail::Serve(serve));
    }

    /// `key` is the queue's.
    pub(crate) fn answer(&self, key: u64, tag: u16, result: i32) {
        self.put(Mail::Answer(key, tag, result));
    }

    pub(crate) fn end(&self) {
        self.put(Mail::End);
    }
}

/// One thread.
#[derive(Debug)]
pub(crate) struct EventLoop {
    pub(crate) mailbox: Arc<Mailbox>,
}

impl EventLoop {
    /// Starts the thread; it is ready when this returns.
    ///
    /// # Errors
    /// When there is no ring or no thread to be had.
    pub(crate) fn start() -> io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mailbox = Arc::new(Mailbox {
            mail: Mutex::default(),
            asleep: AtomicBool::new(false),
            bell,
        });
        let (ready, started) = mpsc::sync_channel(1);
        let its = Arc::clone(&mailbox);
        let run = move || match Running::new(its) {
            Ok(mut running) => {
                let told = ready.send(Ok(()));
                drop(ready);
                if told.is_ok() {
                    running.run();
                }
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        std::thread::Builder::new()
            .name("ublk".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(run)?;
        started.recv().map_err(io::Error::other)??;
        Ok(Self { mailbox })
    }
}

/// A queue that is served.
struct Member {
    serve: Serve,
    /// Tags that the kernel or a handler has.
    tags: u16,
}

/// What the thread has.
struct Running {
    mailbox: Arc<Mailbox>,
    ring: IoUring,
    members: HashMap<u64, Member>,
    ending: bool,
}

impl Running {
    fn new(mailbox: Arc<Mailbox>) -> io::Result<Self> {
        // The kernel binds a queue to the thread that fetches first, so the ring has one submitter: this thread.
        let ring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(SUBMISSIONS)?;
        let mut running = Self {
            mailbox,
            ring,
            members: HashMap::new(),
            ending: false,
        };
        running.poll_bell()?;
        Ok(running)
    }

    fn poll_bell(&mut self) -> io::Result<()> {
        push_poll(&mut self.ring, self.mailbox.bell.as_raw_fd(), BELL)
    }

    fn run(&mut self) {
        loop {
            if let Err(error) = self.step() {
                // Without its ring the thread can serve nobody; the kernel fails or keeps their requests when it is closed.
                tracing::error!(%error, "a thread of the ublk driver cannot go on; its devices are dead");
                return;
            }
            if self.ending && self.members.is_empty() {
                return;
            }
        }
    }

    fn step(&mut self) -> io::Result<()> {
        let mail = std::mem::take(&mut *self.mailbox.lock());
        let mut idle = mail.is_empty();
        for mail in mail {
            match mail {
                Mail::Serve(serve) => self.serve(serve),
                Mail::Answer(key, tag, result) => self.commit(key, tag, result)?,
                Mail::End => self.ending = true,
            }
        }
        let completions: Vec<(u64, i32)> = self
            .ring
            .completion()
            .take(BATCH_MAX)
            .map(|c| (c.user_data(), c.result()))
            .collect();
        idle &= completions.is_empty();
        for (name, result) in completions {
            if name == BELL {
                self.rung()?;
            } else {
                self.completed(name, result);
            }
        }
        if !idle || (self.ending && self.members.is_empty()) {
            self.ring.submit()?;
            return Ok(());
        }
        self.sleep()
    }

    fn sleep(&mut self) -> io::Result<()> {
        self.mailbox.asleep.store(true, Ordering::SeqCst);
        // Whoever puts something in from here on rings the bell.
        if self.mailbox.lock().is_empty() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.mailbox.asleep.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn rung(&mut self) -> io::Result<()> {
        let mut count = [0; 8];
        match rustix::io::read(&self.mailbox.bell, &mut count) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        self.poll_bell()
    }

    fn serve(&mut self, serve: Serve) {
        let queue = Arc::clone(&serve.queue);
        let offered = serve.offered.clone();
        let partitions = serve.partitions;
        self.members.insert(queue.key, Member { serve, tags: 0 });
        let result = if partitions {
            self.offer(&queue)
        } else {
            without_privilege(|| self.offer(&queue))
        };
        if offered.send(result).is_err() {
            tracing::debug!(
                device = queue.served.id,
                "nobody waits for this queue any more"
            );
        }
    }

    /// Offers all tags of a queue to the kernel.
    fn offer(&mut self, queue: &Queue) -> io::Result<()> {
        // What was queued before must not be sent with other privileges.
        self.ring.submit()?;
        for tag in 0..queue.depth() {
            self.send(queue, wire::FETCH, tag, 0)?;
            if let Some(member) = self.members.get_mut(&queue.key) {
                member.tags += 1;
            }
        }
        self.ring.submit().map(drop)
    }

    fn send(&mut self, queue: &Queue, op: u32, tag: u16, result: i32) -> io::Result<()> {
        let command = wire::io_command(queue.number, tag, result);
        let name = queue.key << TAG_BITS | u64::from(tag);
        push_io(&mut self.ring, &queue.served.file, op, command, name)
    }

    fn commit(&mut self, key: u64, tag: u16, result: i32) -> io::Result<()> {
        let Some(member) = self.members.get(&key) else {
            return Ok(());
        };
        let queue = Arc::clone(&member.serve.queue);
        self.send(&queue, wire::COMMIT_AND_FETCH, tag, result)
    }

    /// A tag's command has ended: there is a request, or the kernel takes the tag back.
    fn completed(&mut self, name: u64, result: i32) {
        let key = name >> TAG_BITS;
        let Ok(tag) = u16::try_from(name & u64::from(u16::MAX)) else {
            return;
        };
        let Some(member) = self.members.get_mut(&key) else {
            return;
        };
        if result == wire::RESULT_OK {
            return member.hand_out(tag);
        }
        if result != wire::RESULT_ABORT {
            let error = io::Error::from_raw_os_error(result.saturating_neg());
            tracing::error!(device = member.serve.queue.served.id, tag, %error, "the kernel takes a tag back");
        }
        member.tags = member.tags.saturating_sub(1);
        if member.tags == 0 {
            self.members.remove(&key);
        }
    }
}

/// Does something without this thread's `CAP_SYS_ADMIN`. The kernel looks for partitions only on devices whose queues were all
/// first fetched by threads that have it; Linux 6.12 has no other way to say so.
fn without_privilege<T>(what: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let had = rustix::thread::capabilities(None)?;
    let mut without = had;
    without.effective.remove(CapabilitySet::SYS_ADMIN);
    rustix::thread::set_capabilities(None, without)?;
    let done = what();
    rustix::thread::set_capabilities(None, had)?;
    done
}

impl Member {
    fn hand_out(&self, tag: u16) {
        let queue = &self.serve.queue;
        let Some(request) = self.serve.descs.read(tag).and_then(|d| queue.begin(tag, d)) else {
            tracing::error!(
                device = queue.served.id,
                tag,
                "a request has a tag that was never offered"
            );
            return;
        };
        if request.is_given_up() || !request.is_inside() {
            return request.answer(EIO);
        }
        handle::hand_out(request, self.serve.workers.as_ref());
    }
}
