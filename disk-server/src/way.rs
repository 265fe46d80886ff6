//! How a disk reaches whoever uses it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::SystemTime;

use fuse_driver::disk_file::DiskFile;
use imgstore::disk::bytewise::Bytewise;
use imgstore::disk::device::BlockDevice;
use serde::{Deserialize, Serialize};
use ublk_driver::{Content, Device, Driver, Options, State};

use crate::error::ServeError;
use crate::listener::Listener;
use crate::nbd::Export;
use crate::nbd::server::NbdServer;

/// See the head of this file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A block device of the kernel, `/dev/ublkbN`.
    Ublk,
    /// A regular file, through FUSE.
    File(PathBuf),
    /// A unix socket that speaks NBD.
    Nbd(PathBuf),
}

impl Way {
    /// A block device, where the kernel has ublk.
    ///
    /// # Errors
    /// Says why not, and what else there is.
    pub fn device() -> Result<Self, ServeError> {
        match ublk_driver::probe() {
            Ok(()) => Ok(Self::Ublk),
            Err(why) => Err(ServeError::Refused(format!(
                "a disk cannot be a block device here: {why}. Attach it as a file (`--file PATH`) or at a socket for a virtual machine (`--nbd SOCKET`)"
            ))),
        }
    }
}

impl Way {
    /// Takes away what a dead server left of it.
    pub(crate) fn clean_up(&self, ublk_id: Option<u32>) -> Result<(), ServeError> {
        match (self, ublk_id) {
            (Self::File(path), _) => DiskFile::clean_up(path).map_err(ServeError::from),
            (Self::Nbd(path), _) => {
                drop(Listener::bind(path)?);
                Ok(())
            }
            (Self::Ublk, Some(id)) => {
                let ours = |found: &ublk_driver::Found| (found.id, found.owner) == (id, OWNER);
                if ublk_driver::devices()?.iter().any(ours) {
                    ublk_driver::delete(id)?;
                }
                Ok(())
            }
            (Self::Ublk, None) => Ok(()),
        }
    }
}

/// A disk that can be reached.
#[derive(Debug)]
pub(crate) enum Exposed {
    Ublk {
        device: Device,
        /// Its threads serve the device.
        _driver: Driver,
    },
    File(Arc<DiskFile>),
    Nbd(NbdServer, PathBuf),
}

/// Marks our ublk devices.
const OWNER: u32 = u32::from_le_bytes(*b"disk");

fn ublk(disk: Arc<dyn BlockDevice>, before: Option<u32>) -> Result<Exposed, ServeError> {
    let driver = Driver::start(1)?;
    let options = Options {
        owner: OWNER,
        ..Options::default()
    };
    let left = match before {
        Some(id) => ublk_driver::devices()?
            .into_iter()
            .find(|found| (found.id, found.owner) == (id, OWNER)),
        None => None,
    };
    let device = match left {
        // Its server was killed: requests wait, and go on.
        Some(found) if found.state == State::Waiting => {
            driver.recover(found.id, Content::Disk(disk), &options)?
        }
        _ => driver.add(Content::Disk(disk), &options)?,
    };
    Ok(Exposed::Ublk {
        device,
        _driver: driver,
    })
}

impl Exposed {
    /// Makes `disk` reachable. `ublk_id` is the device that an earlier server had; `gone` is told when somebody else takes
    /// it away.
    pub(crate) fn new(
        way: &Way,
        name: &str,
        disk: Arc<dyn BlockDevice>,
        ublk_id: Option<u32>,
        gone: Sender<()>,
    ) -> Result<Self, ServeError> {
        match way {
            Way::Ublk => ublk(disk, ublk_id),
            Way::File(path) => {
                let disk = Arc::new(Bytewise::new(disk));
                let file = Arc::new(DiskFile::mount(path, disk, SystemTime::now())?);
                let watched = Arc::clone(&file);
                let wait = move || {
                    watched.wait_for_end();
                    // The server may have ended already.
                    gone.send(()).unwrap_or_default();
                };
                let named = std::thread::Builder::new().name("fuse-end".to_owned());
                named.spawn(wait).map_err(ServeError::io("watch", path))?;
                Ok(Self::File(file))
            }
            Way::Nbd(path) => {
                let export = Export {
                    name: name.to_owned(),
                    disk: Arc::new(Bytewise::new(disk)),
                };
                Ok(Self::Nbd(NbdServer::start(path, export)?, path.clone()))
            }
        }
    }

    /// What a user opens.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Ublk { device, .. } => device.path(),
            Self::File(file) => file.path(),
            Self::Nbd(_, path) => path,
        }
    }

    pub(crate) fn ublk_id(&self) -> Option<u32> {
        match self {
            Self::Ublk { device, .. } => Some(device.id()),
            Self::File(_) | Self::Nbd(..) => None,
        }
    }

    /// Clients of a socket.
    pub(crate) fn clients(&self) -> usize {
        match self {
            Self::Nbd(server, _) => server.clients(),
            Self::Ublk { .. } | Self::File(_) => 0,
        }
    }

    /// Takes it away; not while it is in use, unless `force`d.
    pub(crate) fn withdraw(&mut self, force: bool) -> Result<(), ServeError> {
        match self {
            Self::Nbd(server, path) => {
                let clients = server.clients();
                if clients > 0 && !force {
                    return Err(ServeError::InUse(format!(
                        "`{}` has {clients} clients; end them, or detach with `--force`, which cuts them off",
                        path.display()
                    )));
                }
                server.stop();
                Ok(())
            }
            Self::File(file) => match file.unmount(force) {
                Err(error) if is_busy(&error) => Err(ServeError::InUse(format!(
                    "`{0}` is in use (`fuser -v {0}` lists who uses it); end that, or detach with `--force`, which cuts it off",
                    file.path().display()
                ))),
                other => Ok(other?),
            },
            Self::Ublk { device, .. } => match device.remove() {
                // Dropping it takes it away from whoever uses it.
                Err(ublk_driver::UblkError::InUse(_)) if force => Ok(()),
                other => Ok(other?),
            },
        }
    }
}

fn is_busy(error: &fuse_driver::mount::FuseError) -> bool {
    match error {
        fuse_driver::mount::FuseError::Unmount { source, .. } => {
            source.kind() == io::ErrorKind::ResourceBusy
        }
        _ => false,
    }
}
