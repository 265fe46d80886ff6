//! Watching a folder of a sandbox: what is made, written, renamed and removed, as it happens.
//!
//! By a process inside (see [`super::files`]) with one inotify. It lives as long as the daemon's connection. What a new folder
//! already holds when it begins to be watched is told as made: nothing gets lost between the two. Of several writes to a
//! file in a row one is told.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use serde::{Deserialize, Serialize};

/// Folders of one watch.
const FOLDERS_MAX: usize = 8192;
/// Bytes of events taken from the kernel at a time.
const READ_BYTES: usize = 64 << 10;

/// What happened to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It is there now.
    Create,
    /// Its contents changed.
    Write,
    /// It is gone.
    Remove,
    /// It has another name, perhaps elsewhere.
    Rename,
    /// Its owner, permissions or attributes changed.
    Chmod,
    /// More happened than could be told: look anew.
    Overflow,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct WatchEvent {
    /// What happened.
    pub change: Change,
    /// The entry's path below the watched folder.
    pub name: String,
}

/// The folders that are watched.
#[derive(Debug)]
pub(super) struct Watch {
    inotify: OwnedFd,
    root: PathBuf,
    recursive: bool,
    /// Below the root, by the kernel's number.
    folders: HashMap<i32, PathBuf>,
}

fn too_many() -> io::Error {
    let message = format!("more than {FOLDERS_MAX} folders: watch a smaller tree");
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

impl Watch {
    /// Begins to watch.
    pub(super) fn new(root: &Path, recursive: bool) -> io::Result<Self> {
        if !fs::metadata(root)?.is_dir() {
            return Err(io::Error::from_raw_os_error(nix::libc::ENOTDIR));
        }
        let mut watch = Self {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            root: root.to_owned(),
            recursive,
            folders: HashMap::new(),
        };
        watch.add(Path::new(""), &mut Vec::new())?;
        Ok(watch)
    }

    /// Watches a folder, and those below it; what they hold is `found`.
    fn add(&mut self, below: &Path, found: &mut Vec<WatchEvent>) -> io::Result<()> {
        let mut todo = vec![below.to_owned()];
        while let Some(folder) = todo.pop() {
            let path = self.root.join(&folder);
            let flags = WatchFlags::CREATE
                | WatchFlags::MODIFY
                | WatchFlags::DELETE
                | WatchFlags::MOVE
                | WatchFlags::ATTRIB
                | WatchFlags::ONLYDIR
                // Links inside a tree are entries, not ways out of it.
                | if folder.as_os_str().is_empty() { WatchFlags::empty() } else { WatchFlags::DONT_FOLLOW };
            let number = match inotify::add_watch(&self.inotify, &path, flags) {
                Ok(number) => number,
                // It has gone already.
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR)
                    if !folder.as_os_str().is_empty() =>
                {
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            self.folders.insert(number, folder.clone());
            if self.folders.len() > FOLDERS_MAX {
                return Err(too_many());
            }
            if !self.recursive {
                break;
            }
            let Ok(entries) = fs::read_dir(&path) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = folder.join(entry.file_name());
                found.push(told(Change::Create, &name));
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    todo.push(name);
                }
            }
        }
        Ok(())
    }

    /// Waits for something to happen and says what; `None` when `other_end` has gone.
    pub(super) fn next(&mut self, other_end: impl AsFd) -> io::Result<Option<Vec<WatchEvent>>> {
        loop {
            let mut fds = [
                PollFd::new(&self.inotify, PollFlags::IN),
                PollFd::new(&other_end, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [events, gone] = fds.map(|fd| !fd.revents().is_empty());
            if gone {
                // Nothing is expected from there: it is the end.
                return Ok(None);
            }
            if events {
                let events = self.take()?;
                if !events.is_empty() {
                    return Ok(Some(events));
                }
            }
        }
    }

    fn take(&mut self) -> io::Result<Vec<WatchEvent>> {
        let mut buffer = vec![std::mem::MaybeUninit::uninit(); READ_BYTES];
        let mut seen: Vec<(i32, ReadFlags, PathBuf)> = Vec::new();
        let mut reader = Reader::new(&self.inotify, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map_or(&b""[..], |name| name.to_bytes());
                    seen.push((event.wd(), event.events(), OsStr::from_bytes(name).into()));
                }
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
            if reader.is_buffer_empty() {
                break;
            }
        }
        let mut events = Vec::new();
        for (number, flags, name) in seen {
            self.translate(number, flags, &name, &mut events)?;
        }
        events.dedup();
        Ok(events)
    }

    fn translate(
        &mut self,
        number: i32,
        flags: ReadFlags,
        name: &Path,
        events: &mut Vec<WatchEvent>,
    ) -> io::Result<()> {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            events.push(told(Change::Overflow, Path::new("")));
            return Ok(());
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.folders.remove(&number);
            return Ok(());
        }
        let Some(folder) = self.folders.get(&number) else {
            return Ok(());
        };
        if name.as_os_str().is_empty() {
            // Of a folder itself: told where it lies.
            return Ok(());
        }
        let name = folder.join(name);
        let kinds = [
            (ReadFlags::CREATE, Change::Create),
            (ReadFlags::MOVED_TO, Change::Create),
            (ReadFlags::MODIFY, Change::Write),
            (ReadFlags::DELETE, Change::Remove),
            (ReadFlags::MOVED_FROM, Change::Rename),
            (ReadFlags::ATTRIB, Change::Chmod),
        ];
        for (flag, change) in kinds {
            if flags.contains(flag) {
                events.push(told(change, &name));
            }
        }
        let new = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        if self.recursive && new && flags.contains(ReadFlags::ISDIR) {
            self.add(&name, events)?;
        }
        if flags.contains(ReadFlags::MOVED_FROM | ReadFlags::ISDIR) {
            // Its events would come under the old name, or from outside.
            let below: Vec<i32> = self
                .folders
                .iter()
                .filter(|(_, folder)| folder.starts_with(&name))
                .map(|(number, _)| *number)
                .collect();
            for number in below {
                self.folders.remove(&number);
                inotify::remove_watch(&self.inotify, number).ok();
            }
        }
        Ok(())
    }
}

fn told(change: Change, name: &Path) -> WatchEvent {
    WatchEvent {
        change,
        name: name.to_string_lossy().into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(watch: &mut Watch) -> Vec<(Change, String)> {
        let events = watch.take().unwrap();
        events.into_iter().map(|e| (e.change, e.name)).collect()
    }

    /// Mutations: without the look into new folders `d/e` is missing; without the removal of moved folders' watches a write
    /// outside is told.
    #[test]
    fn what_happens_below_is_told_and_what_happens_elsewhere_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir_all(&root).unwrap();
        fs::create_dir_all(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, root.join("link")).unwrap();
        let mut watch = Watch::new(&root, true).unwrap();
        fs::write(root.join("a"), b"1").unwrap();
        fs::create_dir_all(root.join("d/e")).unwrap();
        fs::write(root.join("d/e/f"), b"1").unwrap();
        fs::write(outside.join("g"), b"1").unwrap();
        let own = |change, name: &str| (change, name.to_owned());
        let seen = drain(&mut watch);
        for expected in [
            own(Change::Create, "a"),
            own(Change::Write, "a"),
            own(Change::Create, "d"),
            own(Change::Create, "d/e"),
            own(Change::Create, "d/e/f"),
        ] {
            assert!(seen.contains(&expected), "{expected:?} in {seen:?}");
        }
        assert!(seen.iter().all(|(_, name)| !name.contains('g')), "{seen:?}");
        fs::rename(root.join("a"), root.join("b")).unwrap();
        fs::remove_file(root.join("d/e/f")).unwrap();
        assert_eq!(
            drain(&mut watch),
            [
                own(Change::Rename, "a"),
                own(Change::Create, "b"),
                own(Change::Remove, "d/e/f")
            ]
        );
        fs::rename(root.join("d"), outside.join("d")).unwrap();
        assert_eq!(drain(&mut watch), [own(Change::Rename, "d")]);
        fs::write(outside.join("d/e/h"), b"1").unwrap();
        assert_eq!(drain(&mut watch), []);
        let mut flat = Watch::new(&root, false).unwrap();
        fs::create_dir(root.join("x")).unwrap();
        fs::write(root.join("x/y"), b"1").unwrap();
        assert_eq!(drain(&mut flat), [own(Change::Create, "x")]);
        assert!(Watch::new(&root.join("b"), false).is_err());
    }
}
