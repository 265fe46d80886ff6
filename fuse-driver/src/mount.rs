//! Mounting, and which images are in the mount.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use fuser::{BackgroundSession, Config, INodeNo, MountOption, Notifier, Session};
use imgstore::image::BlockImage;
use rustix::mount::UnmountFlags;

use crate::tree::ROOT_INO;
use crate::wire::{Shared, Wire};

/// Threads that read requests. They only translate; two keep a slow copy from delaying the next request.
const LOOP_THREADS: usize = 2;

/// Why the mount could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseError {
    /// The mount itself failed.
    #[error("cannot mount FUSE at `{path}`: {source} (is /dev/fuse there, and are you root?)")]
    Mount {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// An image of that name is being served.
    #[error("an image `{0}` is already served")]
    Exists(String),
    /// No image of that name is being served.
    #[error("no image `{0}` is served")]
    Missing(String),
    /// The kernel refused a notification.
    #[error("the kernel refused to change its cache of `{name}`: {source}")]
    Notify {
        /// The image.
        name: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The mount could not be taken away.
    #[error("cannot unmount `{path}`: {source}")]
    Unmount {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// A FUSE mount that serves images as files. Dropping it leaves the mount to the process's end, which aborts it: readers
/// then get errors, never data.
#[derive(Debug)]
pub struct FuseMount {
    path: PathBuf,
    shared: Arc<Shared>,
    notifier: Notifier,
    /// Ends by itself when the kernel lets go of the mount.
    session: Mutex<Option<BackgroundSession>>,
}

impl FuseMount {
    /// Mounts an empty directory of images at `path` (read-only, nosuid, nodev, owner only) and starts to serve it.
    ///
    /// # Errors
    /// [`FuseError::Mount`] says what the kernel refused.
    pub fn new(path: &Path, now: SystemTime) -> Result<Self, FuseError> {
        let failed = |source| FuseError::Mount {
            path: path.to_owned(),
            source,
        };
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::RO,
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::NoExec,
            MountOption::FSName("dsec".to_owned()),
            MountOption::Subtype("dsec".to_owned()),
        ];
        config.n_threads = Some(LOOP_THREADS);
        config.clone_fd = true;
        let shared = Arc::new(Shared::new(now));
        let session = Session::new(Wire(Arc::clone(&shared)), path, &config).map_err(failed)?;
        let notifier = session.notifier();
        shared.set_notifier(notifier.clone());
        let session = session.spawn().map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            shared,
            notifier,
            session: Mutex::new(Some(session)),
        })
    }

    /// Waits until the kernel has let go of the mount: somebody unmounted it, or aborted its connection. Nothing can be served
    /// any more then. For one caller; others return at once.
    pub fn wait_for_end(&self) {
        let session = self.session.lock();
        let session = session.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = session.map(BackgroundSession::join) {
            tracing::debug!(%error, "the FUSE session ended");
        }
    }

    /// The path of the image called `name`.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Serves `image` as the file `name`. Its first `preload` bytes are put into the kernel's page cache when the file is
    /// first opened; the open waits for that.
    ///
    /// # Errors
    /// [`FuseError::Exists`] when the name is taken.
    pub fn add(
        &self,
        name: &str,
        image: Arc<dyn BlockImage>,
        preload: u64,
    ) -> Result<(), FuseError> {
        self.shared
            .tree_mut()
            .add(name, image, preload)
            .map(|_ino| ())
            .ok_or_else(|| FuseError::Exists(name.to_owned()))
    }

    /// Stops to serve `name`; files that are open stay readable until they are closed.
    ///
    /// # Errors
    /// [`FuseError::Missing`] when there is no such name.
    pub fn remove(&self, name: &str) -> Result<(), FuseError> {
        let removed = self.shared.tree_mut().remove(name);
        if removed.is_none() {
            return Err(FuseError::Missing(name.to_owned()));
        }
        // Not under the tree's lock: the kernel may send requests before it answers. Pages are left alone: they go with the
        // inode, and dropping them waits for reads, which wait for this process. Killed in that moment it could not die,
        // and its readers would hang instead of getting an error.
        self.notifier
            .inval_entry(INodeNo(ROOT_INO), OsStr::new(name))
            .map_err(|source| FuseError::Notify {
                name: name.to_owned(),
                source,
            })
    }

    /// Puts bytes of an image into the kernel's page cache, if the kernel knows the file.
    ///
    /// # Errors
    /// [`FuseError::Missing`] or [`FuseError::Notify`].
    pub fn store(&self, name: &str, offset: u64, bytes: &[u8]) -> Result<(), FuseError> {
        let ino = self.shared.tree().lookup(name).map(|file| file.ino);
        let ino = ino.ok_or_else(|| FuseError::Missing(name.to_owned()))?;
        self.notifier
            .store(INodeNo(ino), offset, bytes)
            .map_err(|source| FuseError::Notify {
                name: name.to_owned(),
                source,
            })
    }

    /// Takes the mount away from the directory tree, also while files are open: those are served until they are closed or
    /// the process ends.
    ///
    /// # Errors
    /// [`FuseError::Unmount`] says what the kernel refused.
    pub fn unmount(&self) -> Result<(), FuseError> {
        let failed = |source| FuseError::Unmount {
            path: self.path.clone(),
            source,
        };
        if let Err(source) = rustix::mount::unmount(&*self.path, UnmountFlags::DETACH) {
            // EINVAL: somebody else has unmounted it already.
            if source != rustix::io::Errno::INVAL {
                return Err(failed(source.into()));
            }
        }
        Ok(())
    }
}
