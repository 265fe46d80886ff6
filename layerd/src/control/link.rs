//! The control process's end of the connection to the data plane.
//!
//! Messages are written under a lock by whoever has one; answers to requests find their sender by id. When the connection
//! ends, everybody who waits is told.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use imgstore::ids::Digest;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::driver::Driver;
use crate::kill::step;
use crate::protocol::{
    FEATURES_NEEDED, Failure, PlaneStats, ToControl, ToData, Touches, VERSION, features,
    read_message, write_message,
};

/// How long the data plane may take for a request. Adding a layer reads its metadata once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it may take to say that it ends.
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long it may take to say its name.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a message may wait for room in the socket: a data plane that is stopped must not stop us.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the data plane did not do something.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the data plane is gone: {0}")]
    Gone(String),
    #[error("the data plane did not answer within {} s", .0.as_secs())]
    Silent(Duration),
    #[error(
        "the running data plane (process {pid}) speaks version {found} of the protocol, this layerd version {VERSION}: start the layerd that it belongs to, or end it with `kill {pid}`; its mounts then give EIO and must be made again"
    )]
    Version { found: u32, pid: u32 },
    #[error(
        "the running data plane (process {pid}) lacks `{missing}`, without which this layerd cannot use it: start the layerd that it belongs to, or end it with `kill {pid}`; its mounts then give EIO and must be made again"
    )]
    Feature { missing: &'static str, pid: u32 },
    #[error("{}", .0.message)]
    Refused(Failure),
}

/// What came of a request.
#[derive(Debug)]
struct Answer {
    failure: Option<Failure>,
    stats: Option<Box<PlaneStats>>,
    touches: Option<Box<Touches>>,
    source: Option<PathBuf>,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct PlaneLink {
    pub(crate) pid: u32,
    /// What it served when we connected.
    pub(crate) layers: Vec<Digest>,
    /// How it offers layers.
    pub(crate) driver: Driver,
    /// The process itself, taken while it certainly lived, so that its number is not somebody else's by now.
    pub(crate) process: Option<OwnedFd>,
    features: Vec<String>,
    writer: Mutex<UnixStream>,
    waiting: Mutex<Option<HashMap<u64, SyncSender<Answer>>>>,
    next_id: AtomicU64,
}

/// The reading half, until somebody listens.
#[derive(Debug)]
pub(crate) struct PlaneReader(BufReader<UnixStream>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a data plane says of itself.
#[derive(Debug)]
struct Welcome {
    version: u32,
    pid: u32,
    layers: Vec<Digest>,
    features: Vec<String>,
    driver: Driver,
}

impl Welcome {
    /// Whether a control process that needs these features can use it.
    fn check(&self, needed: &[&'static str]) -> Result<(), LinkError> {
        let pid = self.pid;
        if self.version != VERSION {
            let found = self.version;
            return Err(LinkError::Version { found, pid });
        }
        match needed
            .iter()
            .find(|n| !self.features.iter().any(|f| f == *n))
        {
            Some(missing) => Err(LinkError::Feature { missing, pid }),
            None => Ok(()),
        }
    }
}

/// The data plane's welcome. It may say other things first, for it takes a connection as soon as it
/// is there: those are skipped, and said again after the welcome.
fn wait_for_welcome(
    stream: &UnixStream,
    reader: &mut BufReader<UnixStream>,
    timeout: Duration,
) -> Result<Welcome, LinkError> {
    let gone = |e: io::Error| LinkError::Gone(e.to_string());
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LinkError::Silent(timeout));
        }
        stream.set_read_timeout(Some(left)).map_err(gone)?;
        match read_message(reader).map_err(gone)? {
            Some((
                ToControl::Welcome {
                    version,
                    pid,
                    layers,
                    features,
                    driver,
                },
                _,
            )) => {
                stream.set_read_timeout(None).map_err(gone)?;
                return Ok(Welcome {
                    version,
                    pid,
                    layers,
                    features,
                    driver,
                });
            }
            Some((skipped, _)) => tracing::debug!(?skipped, "said before the welcome"),
            None => return Err(LinkError::Gone("it gave no welcome".to_owned())),
        }
    }
}

impl PlaneLink {
    /// Connects to the data plane at `socket`; `None` when nobody listens there.
    ///
    /// # Errors
    /// When somebody listens who is not our data plane.
    pub(crate) fn connect(socket: &Path) -> Result<Option<(Self, PlaneReader)>, LinkError> {
        Self::connect_within(socket, WELCOME_TIMEOUT)
    }

    fn connect_within(
        socket: &Path,
        timeout: Duration,
    ) -> Result<Option<(Self, PlaneReader)>, LinkError> {
        let gone = |e: io::Error| LinkError::Gone(e.to_string());
        let mut stream = match UnixStream::connect(socket) {
            Ok(stream) => stream,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(None);
            }
            Err(e) => return Err(gone(e)),
        };
        stream.set_write_timeout(Some(SEND_TIMEOUT)).map_err(gone)?;
        let hello = ToData::Hello {
            version: VERSION,
            features: features(),
        };
        write_message(&mut stream, &hello, &[]).map_err(gone)?;
        let mut reader = BufReader::with_capacity(8 << 10, stream.try_clone().map_err(gone)?);
        let welcome = wait_for_welcome(&stream, &mut reader, timeout)?;
        welcome.check(&FEATURES_NEEDED)?;
        let process = i32::try_from(welcome.pid).ok().and_then(Pid::from_raw);
        let link = Self {
            pid: welcome.pid,
            layers: welcome.layers,
            features: welcome.features,
            driver: welcome.driver,
            process: process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()),
            writer: Mutex::new(stream),
            waiting: Mutex::new(Some(HashMap::new())),
            next_id: AtomicU64::new(1),
        };
        Ok(Some((link, PlaneReader(reader))))
    }

    /// Whether its build has this feature.
    pub(crate) fn can(&self, feature: &str) -> bool {
        self.features.iter().any(|f| f == feature)
    }

    /// Hands every message that is not an answer to `wish`, until the connection ends.
    pub(crate) fn listen(&self, reader: PlaneReader, wish: impl Fn(ToControl)) {
        let mut reader = reader.0;
        loop {
            match read_message(&mut reader) {
                Ok(Some((
                    ToControl::Done {
                        id,
                        failure,
                        stats,
                        touches,
                        source,
                    },
                    _,
                ))) => {
                    let answer = Answer {
                        failure,
                        stats,
                        touches,
                        source,
                    };
                    let sender = lock(&self.waiting).as_mut().and_then(|w| w.remove(&id));
                    // Nobody may wait any more: it took too long.
                    if let Some(sender) = sender
                        && sender.send(answer).is_err()
                    {
                        tracing::debug!(id, "an answer came too late");
                    }
                }
                Ok(Some((message, _))) => wish(message),
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "the data plane's connection broke");
                    break;
                }
            }
        }
        // Dropping the senders wakes whoever waits.
        lock(&self.waiting).take();
    }

    /// Sends a message that has no answer. A failure is the reader's to notice: the connection ends.
    pub(crate) fn send(&self, message: &ToData, bytes: &[u8]) {
        let mut writer = lock(&self.writer);
        match write_message(&mut *writer, message, bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                tracing::error!(%error, "a message for the data plane is not sent");
            }
            Err(error) => {
                tracing::debug!(%error, "the data plane does not listen");
                // A part of the message may be on its way: nothing that follows would be understood.
                if let Err(error) = writer.shutdown(Shutdown::Both) {
                    tracing::debug!(%error, "the connection was gone already");
                }
            }
        }
    }

    fn ask(&self, message: impl FnOnce(u64) -> ToData) -> Result<Answer, LinkError> {
        self.ask_within(message, ANSWER_TIMEOUT)
    }

    fn ask_within(
        &self,
        message: impl FnOnce(u64) -> ToData,
        timeout: Duration,
    ) -> Result<Answer, LinkError> {
        let gone = || LinkError::Gone("its connection ended".to_owned());
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (send, receive) = mpsc::sync_channel(1);
        lock(&self.waiting)
            .as_mut()
            .ok_or_else(gone)?
            .insert(id, send);
        self.send(&message(id), &[]);
        match receive.recv_timeout(timeout) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(waiting) = lock(&self.waiting).as_mut() {
                    waiting.remove(&id);
                }
                Err(LinkError::Silent(timeout))
            }
        }
    }

    fn command(&self, message: impl FnOnce(u64) -> ToData) -> Result<(), LinkError> {
        step("asking the data plane");
        let failure = self.ask(message)?.failure;
        step("the data plane answered");
        Self::outcome(failure)
    }

    fn outcome(failure: Option<Failure>) -> Result<(), LinkError> {
        failure.map_or(Ok(()), |failure| Err(LinkError::Refused(failure)))
    }

    /// Serve this layer; `ahead`: its hot segments may be loaded before they are read. Where the kernel finds it; none from a
    /// build that has FUSE only.
    ///
    /// # Errors
    /// [`LinkError::Refused`] with the data plane's reason.
    pub(crate) fn add_image(
        &self,
        layer: Digest,
        ahead: bool,
    ) -> Result<Option<PathBuf>, LinkError> {
        self.add(layer, ahead, false)
    }

    fn add(
        &self,
        layer: Digest,
        ahead: bool,
        uncounted: bool,
    ) -> Result<Option<PathBuf>, LinkError> {
        step("asking the data plane");
        let answer = self.ask(|id| ToData::AddImage {
            id,
            layer,
            uncounted,
            ahead,
        })?;
        step("the data plane answered");
        Self::outcome(answer.failure).map(|()| answer.source)
    }

    /// Serve this layer, and count nothing for it.
    ///
    /// # Errors
    /// As for [`PlaneLink::add_image`].
    pub(crate) fn add_uncounted_image(&self, layer: Digest) -> Result<Option<PathBuf>, LinkError> {
        self.add(layer, false, true)
    }

    /// Serve this layer no more.
    ///
    /// # Errors
    /// [`LinkError::Refused`] with the data plane's reason.
    pub(crate) fn remove_image(&self, layer: Digest) -> Result<(), LinkError> {
        self.command(|id| ToData::RemoveImage { id, layer })
    }

    /// All counters.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn stats(&self) -> Result<PlaneStats, LinkError> {
        let answer = self.ask(|id| ToData::Stats { id })?;
        let stats = answer.stats;
        stats
            .map(|stats| *stats)
            .ok_or_else(|| LinkError::Gone("it sent no statistics".to_owned()))
    }

    /// The first touches of a layer; none of one that is not served.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn touches(&self, layer: Digest) -> Result<Touches, LinkError> {
        let answer = self.ask(|id| ToData::Trace { id, layer })?;
        Ok(answer.touches.map(|touches| *touches).unwrap_or_default())
    }

    /// Unmount and end.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn exit(&self) -> Result<(), LinkError> {
        let answer = self.ask_within(|id| ToData::Exit { id }, EXIT_TIMEOUT)?;
        Self::outcome(answer.failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Somebody who listens and says whatever `then` says, until nobody hears it.
    fn plane(
        folder: &Path,
        then: impl Fn(&mut UnixStream) -> io::Result<()> + Send + 'static,
    ) -> PathBuf {
        let socket = folder.join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let hello = read_message::<ToData>(&mut stream).unwrap().unwrap().0;
            assert!(matches!(
                hello,
                ToData::Hello {
                    version: VERSION,
                    ..
                }
            ));
            then(&mut stream)
        });
        socket
    }

    fn need() -> ToControl {
        ToControl::Need {
            layer: Digest::of(b"layer"),
            first: 0,
            count: 1,
            prefetch: false,
        }
    }

    #[test]
    fn what_is_said_before_the_welcome_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let layers = vec![Digest::of(b"layer")];
        let served = layers.clone();
        let socket = plane(folder.path(), move |stream| {
            for _ in 0..3 {
                write_message(stream, &need(), &[])?;
            }
            let welcome = ToControl::Welcome {
                version: VERSION,
                pid: std::process::id(),
                layers: served.clone(),
                features: vec!["unheard-of".to_owned()],
                driver: Driver::Ublk,
            };
            write_message(stream, &ToControl::Unknown, &[])?;
            write_message(stream, &welcome, &[])
        });
        let (link, _) = PlaneLink::connect(&socket).unwrap().unwrap();
        assert_eq!((link.pid, link.layers), (std::process::id(), layers));
    }

    #[test]
    fn a_data_plane_that_talks_without_a_welcome_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let socket = plane(folder.path(), |stream| {
            loop {
                write_message(stream, &need(), &[])?;
            }
        });
        let failed = PlaneLink::connect_within(&socket, Duration::from_millis(50));
        assert!(matches!(
            failed,
            Err(LinkError::Silent(_) | LinkError::Gone(_))
        ));
    }

    /// Mutations: without the comparison of versions the first case passes; without that of features the second.
    #[test]
    fn another_version_and_a_missing_feature_are_named_with_what_to_do() {
        let welcome = |version, features: &[&str]| Welcome {
            version,
            pid: 42,
            layers: Vec::new(),
            features: features.iter().map(|f| (*f).to_owned()).collect(),
            driver: Driver::Fuse,
        };
        let newer = welcome(VERSION + 1, &["a"]).check(&[]).unwrap_err();
        let older = welcome(VERSION, &["a"]).check(&["a", "b"]).unwrap_err();
        for (error, part) in [(newer, "version 2"), (older, "lacks `b`")] {
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("kill 42"), "{text}");
        }
        welcome(VERSION, &["b", "c", "a"])
            .check(&["a", "b"])
            .unwrap();
        welcome(VERSION, &[]).check(&[]).unwrap();
    }

    #[test]
    fn nobody_there_is_no_data_plane() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        assert!(PlaneLink::connect(&socket).unwrap().is_none());
        drop(UnixListener::bind(&socket).unwrap());
        assert!(PlaneLink::connect(&socket).unwrap().is_none());
    }
}
