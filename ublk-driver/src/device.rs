//! The driver's threads, and the life of one device.

use std::fs::{self, File};
use std::io;
use std::num::NonZero;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use crate::content::Content;
use crate::control::{COMMAND_PATIENCE, Control};
use crate::error::UblkError;
use crate::event_loop::{EventLoop, Serve};
use crate::found::State;
use crate::options::{Options, Recovery};
use crate::probe::features_here;
use crate::request::{Queue, Served};
use crate::sys::Descs;
use crate::wire::{self, Command, DevInfo, Params, SECTOR, features};
use crate::workers::Workers;

/// Longest request: what a worker's buffer grows to.
const IO_BYTES_MAX: u32 = 512 << 10;
/// Longest wait for a device's files, which the kernel makes itself, and for a dead server's end.
const FILES_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for a device to stop: what was written through the page cache is written to the content before.
const STOP_PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(2);
/// Most threads of a driver.
const LOOPS_MAX: usize = 16;

/// The threads that talk to the kernel. One is enough for a process, however many devices it serves.
#[derive(Debug, Clone)]
pub struct Driver {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    loops: Vec<EventLoop>,
    features: u64,
    next: AtomicUsize,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for one in &self.loops {
            one.mailbox.end();
        }
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// `/dev/ublkbN`.
pub(crate) fn block_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// `/dev/ublkcN`.
fn char_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// Tries until it works, for a while.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + FILES_PATIENCE;
    loop {
        match attempt() {
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => std::thread::sleep(PAUSE),
            done => return done,
        }
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> UblkError {
    let path = path.to_owned();
    move |source| UblkError::Io { what, path, source }
}

fn thread_error(source: io::Error) -> UblkError {
    UblkError::System {
        what: "start a thread of the ublk driver",
        source,
    }
}

/// Claims a block device for a moment, so that nobody mounts it meanwhile; `None` where there is no such device.
pub(crate) fn claim(id: u32) -> Result<Option<File>, UblkError> {
    let path = block_path(id);
    let open = File::options()
        .read(true)
        .custom_flags(nix::libc::O_EXCL | nix::libc::O_NONBLOCK)
        .open(&path);
    match open {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Err(UblkError::InUse(path)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(nix::libc::ENXIO) => Ok(None),
        Err(e) => Err(io_error("claim", &path)(e)),
    }
}

/// What a device is made with.
struct Shape {
    queues: u16,
    depth: u16,
    read_only: bool,
    bytes: u64,
}

impl Driver {
    /// Starts `loops` threads, one a CPU (16 at most) where it is 0.
    ///
    /// # Errors
    /// [`UblkError::WhyNot`] where ublk cannot be used.
    pub fn start(loops: usize) -> Result<Self, UblkError> {
        let features = features_here()?;
        let count = if loops == 0 { cpus() } else { loops };
        let start = |_| EventLoop::start().map_err(thread_error);
        let loops = (0..count.min(LOOPS_MAX))
            .map(start)
            .collect::<Result<_, _>>()?;
        let inner = Inner {
            loops,
            features,
            next: AtomicUsize::new(0),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Makes a device; it serves when this returns.
    ///
    /// # Errors
    /// Says what the kernel refused. Nothing is left behind.
    pub fn add(&self, content: Content, options: &Options) -> Result<Device, UblkError> {
        let shape = shape(&content, options)?;
        let wait = match options.recovery {
            Recovery::Wait => features::USER_RECOVERY | features::USER_RECOVERY_REISSUE,
            Recovery::Fail => 0,
        };
        let info = DevInfo {
            queues: shape.queues,
            depth: shape.depth,
            io_bytes_max: IO_BYTES_MAX,
            server_pid: -1,
            flags: features::CMD_IOCTL_ENCODE | features::USER_COPY | wait & self.inner.features,
            mark: DevInfo::mark_of(options.owner),
            ..DevInfo::default()
        };
        let mut control = Control::open()?;
        let info = control.add(&info, options.id)?;
        let params = Params {
            read_only: shape.read_only,
            block_shift: u8::try_from(options.block_bytes.trailing_zeros()).unwrap_or(9),
            io_sectors_max: IO_BYTES_MAX >> 9,
            sectors: shape.bytes / SECTOR,
        };
        let made = control.set_params(info.id, &params).and_then(|()| {
            // The kernel may give fewer queues than it was asked for.
            let shape = Shape {
                queues: info.queues,
                depth: info.depth,
                ..shape
            };
            self.serve(info.id, content, &shape, options, Command::START_DEV)
        });
        made.inspect_err(|_| discard(info.id))
    }

    /// Serves a device again whose server died ([`Recovery::Wait`]): requests that wait go on. The content must be what it
    /// was; options are taken from the device, except for `workers`.
    ///
    /// # Errors
    /// [`UblkError::NoDevice`], [`UblkError::Differs`], or what the kernel refused.
    pub fn recover(
        &self,
        id: u32,
        content: Content,
        options: &Options,
    ) -> Result<Device, UblkError> {
        let mut control = Control::open()?;
        // The kernel needs a moment to see that a server is dead.
        let until = Instant::now() + FILES_PATIENCE;
        let info = loop {
            let info = control.info(id)?;
            if State::from_kernel(info.state) == State::Waiting || Instant::now() >= until {
                break info;
            }
            std::thread::sleep(PAUSE);
        };
        if info.owner() != Some(options.owner) {
            return Err(UblkError::NotOurs(id));
        }
        let params = control.params(id)?;
        let differs = |what, expected, found| UblkError::Differs {
            id,
            what,
            expected,
            found,
        };
        let (sectors, bytes) = (params.sectors, content.len());
        if sectors.checked_mul(SECTOR) != Some(bytes) {
            return Err(differs(
                "a length in bytes of",
                sectors.saturating_mul(SECTOR),
                bytes,
            ));
        }
        if content.is_read_only() && !params.read_only {
            return Err(differs("a content that is writable, 1 or 0,", 1, 0));
        }
        control.plain(Command::START_RECOVERY, id, 0, COMMAND_PATIENCE)?;
        let shape = Shape {
            queues: info.queues,
            depth: info.depth,
            read_only: params.read_only,
            bytes,
        };
        // If this fails the device waits on.
        self.serve(id, content, &shape, options, Command::END_RECOVERY)
    }

    fn serve(
        &self,
        id: u32,
        content: Content,
        shape: &Shape,
        options: &Options,
        start: Command,
    ) -> Result<Device, UblkError> {
        let path = char_path(id);
        // While a dead server's last references go, the file is busy.
        let open = || File::options().read(true).write(true).open(&path);
        let file = patiently(open).map_err(io_error("open", &path))?;
        let workers = match &content {
            Content::Image(_) => None,
            Content::Disk(_) => Some(Workers::start(options.workers).map_err(thread_error)?),
        };
        let served = Arc::new(Served {
            id,
            file,
            content,
            read_only: shape.read_only,
            bytes: shape.bytes,
            given_up: AtomicBool::new(false),
        });
        let alive = Arc::new(());
        let device = Device {
            id,
            path: block_path(id),
            served: Arc::clone(&served),
            alive: Arc::downgrade(&alive),
            removed: Mutex::new(false),
            queues: Mutex::default(),
            _driver: self.clone(),
        };
        for number in 0..shape.queues {
            let mailbox = self.mailbox();
            let descs =
                Descs::map(&served.file, number, shape.depth).map_err(io_error("map", &path))?;
            let queue = Queue::new(
                Arc::clone(&served),
                number,
                shape.depth,
                Arc::clone(&mailbox),
            );
            device.queues().push(Arc::downgrade(&queue));
            let (offered, answer) = mpsc::sync_channel(1);
            mailbox.serve(Serve {
                queue,
                descs,
                workers: workers.clone(),
                partitions: options.partitions,
                offered,
                _alive: Arc::clone(&alive),
            });
            let offered = answer
                .recv_timeout(FILES_PATIENCE)
                .map_err(io::Error::other);
            offered
                .and_then(|r| r)
                .map_err(io_error("offer requests of", &path))?;
        }
        drop(alive);
        let pid = u64::from(std::process::id());
        Control::open()?.plain(start, id, pid, COMMAND_PATIENCE)?;
        patiently(|| fs::metadata(&device.path)).map_err(io_error("find", &device.path))?;
        Ok(device)
    }

    fn mailbox(&self) -> Arc<crate::event_loop::Mailbox> {
        let loops = &self.inner.loops;
        let at = self.inner.next.fetch_add(1, Ordering::Relaxed) % loops.len().max(1);
        let one = loops.get(at).expect("a driver has a thread at least");
        Arc::clone(&one.mailbox)
    }
}

fn shape(content: &Content, options: &Options) -> Result<Shape, UblkError> {
    let queues = options
        .queues
        .unwrap_or_else(|| u16::try_from(cpus()).unwrap_or(wire::QUEUES_MAX));
    wire::check_shape(queues, options.depth, options.block_bytes)?;
    let bytes = content.len();
    if bytes == 0 || !bytes.is_multiple_of(u64::from(options.block_bytes)) {
        return Err(UblkError::Invalid(format!(
            "a content of {bytes} bytes is not a number of blocks of {}",
            options.block_bytes
        )));
    }
    Ok(Shape {
        queues,
        depth: options.depth,
        read_only: options.read_only || content.is_read_only(),
        bytes,
    })
}

/// Deletes a device that nobody has seen yet.
fn discard(id: u32) {
    let deleted =
        Control::open().and_then(|mut c| c.plain(Command::DEL_DEV_ASYNC, id, 0, COMMAND_PATIENCE));
    if let Err(error) = deleted {
        tracing::warn!(device = id, %error, "a device that could not be started stays");
    }
}

/// A device that this process serves. Dropping it takes it away, whoever uses it: they get EIO.
#[derive(Debug)]
pub struct Device {
    id: u32,
    path: PathBuf,
    served: Arc<Served>,
    /// Gone when the kernel has taken all tags back.
    alive: Weak<()>,
    removed: Mutex<bool>,
    queues: Mutex<Vec<Weak<Queue>>>,
    _driver: Driver,
}

impl Device {
    /// The number N of `/dev/ublkbN`.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// `/dev/ublkbN`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn queues(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Queue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the device away. What was written through the page cache is written to the content before; reads of an image that are
    /// not answered yet fail with EIO. Whoever merely has it open gets errors from then on. Does nothing the second time.
    ///
    /// # Errors
    /// [`UblkError::InUse`] while it is mounted or claimed: it is served on.
    pub fn remove(&self) -> Result<(), UblkError> {
        let mut removed = self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        if *removed {
            return Ok(());
        }
        let claimed = claim(self.id)?;
        self.take_away(matches!(self.served.content, Content::Image(_)))?;
        *removed = true;
        drop(claimed);
        Ok(())
    }

    /// Takes the device away whoever uses it: every request fails with EIO from now on. Only for a process that ends: see
    /// [`Recovery::Fail`] for what a file system that is still mounted may then read.
    ///
    /// # Errors
    /// What the kernel refused; the device fails requests all the same.
    pub fn remove_by_force(&self) -> Result<(), UblkError> {
        let mut removed = self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        if *removed {
            return Ok(());
        }
        *removed = true;
        self.take_away(true)
    }

    fn take_away(&self, give_up: bool) -> Result<(), UblkError> {
        if give_up {
            self.served.given_up.store(true, Ordering::Release);
            for queue in self.queues().iter().filter_map(Weak::upgrade) {
                queue.give_up();
            }
        }
        let mut control = Control::open()?;
        control.plain(Command::STOP_DEV, self.id, 0, STOP_PATIENCE)?;
        control.plain(Command::DEL_DEV_ASYNC, self.id, 0, COMMAND_PATIENCE)?;
        // The queues' last reference to the character file goes with the tags.
        let ended = patiently(|| match self.alive.strong_count() {
            0 => Ok(()),
            _ => Err(io::ErrorKind::TimedOut.into()),
        });
        ended.map_err(io_error("end", &self.path))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = self.remove_by_force() {
            tracing::error!(device = self.id, %error, "a ublk device could not be taken away");
        }
    }
}
