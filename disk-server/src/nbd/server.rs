//! Clients of the NBD socket: a thread each, a bounded number of them.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::handshake::{Agreed, handshake};
use super::transmission::{STALL_SECONDS, serve};
use super::{Export, NbdError, is_loud};
use crate::error::ServeError;
use crate::listener::{Listener, Stop};

/// Most clients at a time; one more is turned away. `nbdcopy` takes four connections, QEMU one.
const CLIENTS_MAX: usize = 16;

/// Connections that ended early.
static ENDED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Default)]
struct Clients {
    next: u64,
    open: HashMap<u64, UnixStream>,
}

/// A disk at a socket.
#[derive(Debug)]
pub struct NbdServer {
    stop: Arc<Stop>,
    clients: Arc<Mutex<Clients>>,
    /// Ends when all clients have gone.
    thread: Option<JoinHandle<()>>,
}

fn lock(clients: &Mutex<Clients>) -> MutexGuard<'_, Clients> {
    clients.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One client, from greeting to end.
fn talk(mut stream: UnixStream, export: &Export, stop: &Stop) -> Result<(), NbdError> {
    let stall = Some(Duration::from_secs(STALL_SECONDS));
    stream.set_read_timeout(stall)?;
    stream.set_write_timeout(stall)?;
    if handshake(&mut stream, export)? == Agreed::Gone {
        return Ok(());
    }
    let out = stream.try_clone()?;
    let shut = || {
        // It may be shut already.
        drop(out.shutdown(Shutdown::Both));
    };
    serve(&mut stream, &out, export, &shut, &|| !stop.is_stopped())
}

/// Accepts until told to stop, then waits for the clients.
fn accept(listener: &Listener, export: &Export, stop: &Stop, clients: &Mutex<Clients>) {
    std::thread::scope(|scope| {
        loop {
            let stream = match listener.accept(stop) {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(%error, "the NBD socket takes no more clients");
                    return;
                }
            };
            let mut open = lock(clients);
            if open.open.len() >= CLIENTS_MAX {
                if is_loud(&ENDED) {
                    tracing::warn!("an NBD client was turned away: {CLIENTS_MAX} are there");
                }
                continue;
            }
            let kept = match stream.try_clone() {
                Ok(kept) => kept,
                Err(error) => {
                    tracing::warn!(%error, "cannot serve an NBD client");
                    continue;
                }
            };
            open.next += 1;
            let id = open.next;
            open.open.insert(id, kept);
            drop(open);
            let serve = move || {
                if let Err(error) = talk(stream, export, stop)
                    && is_loud(&ENDED)
                {
                    tracing::warn!(client = id, %error, "an NBD client's connection ends");
                }
                // Also the copy that is kept must go, or the client sees no end.
                if let Some(kept) = lock(clients).open.remove(&id) {
                    drop(kept.shutdown(Shutdown::Both));
                }
            };
            let named = std::thread::Builder::new().name(format!("nbd-{id}"));
            if let Err(error) = named.spawn_scoped(scope, serve) {
                tracing::warn!(%error, "cannot serve an NBD client");
                lock(clients).open.remove(&id);
            }
        }
    });
}

impl NbdServer {
    /// Serves `export` at the socket `path`.
    ///
    /// # Errors
    /// When the socket cannot be made, or somebody else has it.
    pub fn start(path: &Path, export: Export) -> Result<Self, ServeError> {
        let listener = Listener::bind(path)?;
        let failed = |error| ServeError::io("serve", path)(error);
        let stop = Arc::new(Stop::new().map_err(failed)?);
        let clients = Arc::new(Mutex::new(Clients::default()));
        let run = {
            let (stop, clients) = (Arc::clone(&stop), Arc::clone(&clients));
            move || accept(&listener, &export, &stop, &clients)
        };
        let thread = std::thread::Builder::new().name("nbd-accept".to_owned());
        Ok(Self {
            stop,
            clients,
            thread: Some(thread.spawn(run).map_err(failed)?),
        })
    }

    /// How many clients there are.
    pub fn clients(&self) -> usize {
        lock(&self.clients).open.len()
    }

    /// Takes no more clients, ends the connections of those that are there, and waits until what they asked is done.
    pub fn stop(&mut self) {
        self.stop.stop();
        for stream in lock(&self.clients).open.values() {
            // Only the half that is read: what was taken is still answered.
            drop(stream.shutdown(Shutdown::Read));
        }
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the NBD server's thread panicked");
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop();
    }
}
