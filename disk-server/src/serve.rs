//! One disk's server: opens the folder, makes the disk reachable, answers on the control socket, ends when told.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use imgstore::disk::device::BlockDevice;
use imgstore::disk::folder::DiskFolder;
use imgstore::format::overlaybd::SECTOR;
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};

use crate::control::{REQUEST_BYTES_MAX, Reply, Request, SOCKET, Status, receive, send};
use crate::error::ServeError;
use crate::listener::{Listener, Stop};
use crate::way::{Exposed, Way};

/// What is remembered of how a disk is attached; it stays when the server is killed.
const ATTACHED: &str = "attached.json";
/// Most requests at a time on the control socket.
const REQUESTS_MAX: usize = 8;
/// Extents of the writable layer beyond which it is sealed by itself: about 50 MB of memory.
const EXTENTS_MAX: usize = 500_000;
/// How often that is looked at.
const TIDY_PAUSE: Duration = Duration::from_secs(1);
/// Longest wait for a request once somebody has connected.
const REQUEST_MAX: Duration = Duration::from_secs(5);

/// How a disk was attached last; gone after a detach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// How.
    pub way: Way,
    /// The ublk device.
    #[serde(default)]
    pub ublk_id: Option<u32>,
}

/// How the disk in `folder` was attached by a server that was killed; `None` when none was.
///
/// # Errors
/// When that cannot be read.
pub fn left_attached(folder: &Path) -> Result<Option<Attached>, ServeError> {
    let path = folder.join(ATTACHED);
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| ServeError::io("read", &path)(error.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ServeError::io("read", &path)(error)),
    }
}

/// Takes away what a server that was killed left: its mount, socket or device. Nobody serves the disk meanwhile.
///
/// # Errors
/// When the disk is served, or something cannot be taken away.
pub fn clean_up(folder: &Path) -> Result<(), ServeError> {
    // What was flushed is made whole on this occasion.
    let held = DiskFolder::open(folder)?;
    let Some(left) = left_attached(folder)? else {
        return Ok(());
    };
    left.way.clean_up(left.ublk_id)?;
    remove(&folder.join(SOCKET))?;
    remove(&folder.join(ATTACHED))?;
    drop(held);
    Ok(())
}

/// Removes a file that may be gone already.
pub(crate) fn remove(path: &Path) -> Result<(), ServeError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(ServeError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

fn remember(folder: &Path, attached: &Attached) -> io::Result<()> {
    let tmp = folder.join("attached.json.tmp");
    let mut file = fs::File::create(&tmp)?;
    file.write_all(&serde_json::to_vec(attached)?)?;
    // An empty file after a loss of power could be neither attached nor detached.
    file.sync_all()?;
    fs::rename(tmp, folder.join(ATTACHED))
}

struct Server {
    folder: PathBuf,
    way: Way,
    disk: DiskFolder,
    exposed: Mutex<Exposed>,
    withdrawn: AtomicBool,
    requests: AtomicUsize,
    end: Sender<()>,
}

impl Server {
    fn exposed(&self) -> std::sync::MutexGuard<'_, Exposed> {
        self.exposed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        let view = self.disk.disk().view();
        let exposed = self.exposed();
        Status {
            pid: std::process::id(),
            folder: self.folder.clone(),
            way: self.way.clone(),
            path: exposed.path().to_owned(),
            virtual_size: self.disk.disk().size(),
            layers: self.disk.state().layers.len(),
            written: view.top.data_sectors() * SECTOR,
            extents: view.top.extents(),
            clients: exposed.clients(),
        }
    }

    /// Takes the disk away from its users and makes everything durable.
    fn withdraw(&self, force: bool) -> Result<(), ServeError> {
        let mut exposed = self.exposed();
        if !self.withdrawn.load(Ordering::SeqCst) {
            exposed.withdraw(force)?;
            self.withdrawn.store(true, Ordering::SeqCst);
        }
        let flushed = self.disk.disk().flush();
        flushed.map_err(ServeError::io("flush", &self.folder))
    }

    fn answer(&self, request: Request) -> Result<Reply, ServeError> {
        let micros = |held: Duration| u64::try_from(held.as_micros()).unwrap_or(u64::MAX);
        Ok(match request {
            Request::Status => Reply::Status(self.status()),
            Request::Snapshot { always } => {
                let done = if always {
                    Some(self.disk.snapshot()?)
                } else {
                    self.disk.snapshot_if_written()?
                };
                done.map_or(Reply::Done, |done| Reply::Layer {
                    file: done.layer,
                    held_us: micros(done.held),
                })
            }
            Request::Merge { from, to } => Reply::Layer {
                file: self.disk.merge(from..to)?,
                held_us: 0,
            },
            Request::Restack { count, lowers } => {
                self.disk.restack(count, lowers)?;
                Reply::Done
            }
            Request::Detach { force } => {
                self.withdraw(force)?;
                Reply::Done
            }
        })
    }

    /// One connection: a request, a reply.
    fn talk(&self, mut stream: UnixStream) {
        let request: Request = match stream
            .set_read_timeout(Some(REQUEST_MAX))
            .and_then(|()| stream.set_write_timeout(Some(REQUEST_MAX)))
            .and_then(|()| receive(&stream, REQUEST_BYTES_MAX))
        {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(%error, "no request on the control socket");
                let refused = Reply::Refused(format!("no request: {error}"));
                // Whoever sent nonsense may have gone.
                drop(send(&mut stream, &refused));
                return;
            }
        };
        let ends = matches!(request, Request::Detach { .. });
        let reply = match self.answer(request) {
            Ok(reply) => reply,
            Err(error) => {
                tracing::warn!(%error, "a request was refused");
                Reply::Refused(error.to_string())
            }
        };
        let done = ends && reply == Reply::Done;
        if let Err(error) = send(&mut stream, &reply) {
            tracing::warn!(%error, "nobody takes the reply");
        }
        if done {
            // Somebody else may have ended it.
            self.end.send(()).unwrap_or_default();
        }
    }

    /// Waits until told to end; seals the writable layer where its map grows large. The server holds a sender, so this ends
    /// only when told.
    fn wait(&self, ended: &Receiver<()>) {
        let mut tidy = true;
        while ended.recv_timeout(TIDY_PAUSE) == Err(RecvTimeoutError::Timeout) {
            if !tidy {
                continue;
            }
            match self.disk.snapshot_beyond(EXTENTS_MAX) {
                Ok(None) => {}
                Ok(Some(done)) => {
                    tracing::info!(layer = %done.layer.display(), "sealed a large layer")
                }
                Err(error) => {
                    // It goes on without; to try every second would help nobody.
                    tracing::error!(%error, "the writable layer grows and cannot be sealed");
                    tidy = false;
                }
            }
        }
    }

    /// Accepts until told to stop; requests that are being answered are waited for.
    fn listen(&self, listener: &Listener, stop: &Stop) {
        std::thread::scope(|scope| {
            loop {
                let stream = match listener.accept(stop) {
                    Ok(Some(stream)) => stream,
                    Ok(None) => return,
                    Err(error) => {
                        tracing::error!(%error, "the control socket is closed");
                        return;
                    }
                };
                if self.requests.fetch_add(1, Ordering::SeqCst) >= REQUESTS_MAX {
                    self.requests.fetch_sub(1, Ordering::SeqCst);
                    tracing::warn!("too many requests at a time on the control socket");
                    continue;
                }
                let talk = || {
                    self.talk(stream);
                    self.requests.fetch_sub(1, Ordering::SeqCst);
                };
                let named = std::thread::Builder::new().name("control".to_owned());
                if let Err(error) = named.spawn_scoped(scope, talk) {
                    self.requests.fetch_sub(1, Ordering::SeqCst);
                    tracing::error!(%error, "cannot answer on the control socket");
                }
            }
        });
    }
}

/// Ends the server when the process is asked to end. To be called before other threads exist: they inherit the mask.
fn watch_signals(end: Sender<()>) -> io::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    let wait = move || {
        if let Ok(signal) = signals.wait() {
            tracing::info!(%signal, "ending");
            end.send(()).unwrap_or_default();
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)?;
    Ok(())
}

/// Serves the disk in `folder` until it is detached or the process is asked to end. `ready` is called once it can be used.
///
/// # Errors
/// When it cannot be opened or made reachable, or the last flush fails.
pub fn serve(folder: &Path, way: &Way, ready: impl FnOnce(&Status)) -> Result<(), ServeError> {
    let failed = |what| ServeError::io(what, folder);
    let (end, ended): (_, Receiver<()>) = channel();
    watch_signals(end.clone()).map_err(failed("watch signals for"))?;
    let disk = DiskFolder::open(folder)?;
    let before = left_attached(folder)?.and_then(|attached| attached.ublk_id);
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let listener = Listener::bind(&folder.join(SOCKET))?;
    let stop = Stop::new().map_err(failed("serve"))?;
    let device: Arc<dyn BlockDevice> = disk.disk();
    let exposed = Exposed::new(way, &name, device, before, end.clone())?;
    let attached = Attached {
        way: way.clone(),
        ublk_id: exposed.ublk_id(),
    };
    let server = Server {
        folder: folder.to_owned(),
        way: way.clone(),
        disk,
        exposed: Mutex::new(exposed),
        withdrawn: AtomicBool::new(false),
        requests: AtomicUsize::new(0),
        end,
    };
    std::thread::scope(|scope| {
        let listen = || server.listen(&listener, &stop);
        let named = std::thread::Builder::new().name("control-accept".to_owned());
        let begun = remember(folder, &attached)
            .and_then(|()| named.spawn_scoped(scope, listen).map(drop))
            .map_err(failed("serve"));
        if begun.is_ok() {
            ready(&server.status());
            server.wait(&ended);
        }
        stop.stop();
        begun.and(server.withdraw(true))
    })?;
    fs::remove_file(folder.join(ATTACHED)).map_err(failed("clean"))
}
