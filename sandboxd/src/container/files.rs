//! Work on a sandbox's files, by a process of its own inside the sandbox.
//!
//! It has the sandbox's root, ids and nothing more: a path that leads anywhere through links leads there *inside*. So there
//! is nothing to check and nothing to race with. It may block (a slow origin, a full disk): only its own operation waits.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc;
use serde::{Deserialize, Serialize};

use super::protocol::{self, Answer, Failure, kind};
use super::users;
use super::watch::Watch;

/// Bytes of one frame of file data.
const PIECE_BYTES: usize = 128 << 10;
/// Most entries of one listing.
const ENTRIES_MAX: usize = 100_000;
/// Longest wait for the daemon to send or take something.
const PATIENCE: Duration = Duration::from_secs(120);

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "file", rename_all = "snake_case", deny_unknown_fields)]
pub enum FileRequest {
    /// Send a file's bytes.
    Read {
        /// Which.
        path: String,
        /// From where.
        offset: u64,
        /// Most bytes.
        len: Option<u64>,
    },
    /// Replace a file's contents at a stroke, when all of it has arrived.
    Write {
        /// Which; folders above it are made.
        path: String,
        /// Permissions; those it has, or 0644.
        mode: Option<u32>,
    },
    /// A folder's entries.
    List {
        /// Which.
        path: String,
        /// 1 = its own entries, 2 = theirs too, …
        depth: u32,
    },
    /// One entry; a link itself, not what it leads to.
    Stat {
        /// Which.
        path: String,
    },
    /// Make a folder, and those above it.
    MakeDir {
        /// Which.
        path: String,
        /// Permissions.
        mode: Option<u32>,
    },
    /// Remove a file, a link, or a folder with all in it.
    Remove {
        /// Which.
        path: String,
    },
    /// Rename.
    Rename {
        /// From.
        from: String,
        /// To; what is there is replaced.
        to: String,
    },
    /// Tell what changes in a folder, as it happens, for as long as the connection stays.
    Watch {
        /// Which.
        path: String,
        /// Folders below it too.
        recursive: bool,
    },
    /// Send a folder as a tar stream.
    Pack {
        /// Which.
        path: String,
    },
    /// Unpack a tar stream into a folder.
    Unpack {
        /// Which; it is made.
        path: String,
    },
}

impl FileRequest {
    /// The same with whole paths: `~` and relative ones begin at the working folder, a user's home.
    fn seen_from_here(&self) -> io::Result<Self> {
        let whole = |path: &mut String| {
            let below = match path.strip_prefix('~') {
                Some("") => ".",
                Some(rest) if rest.starts_with('/') => rest.trim_start_matches('/'),
                _ => path,
            };
            let found = std::env::current_dir()?.join(below);
            // Without `.` and double strokes; `..` stays, for links.
            let found: PathBuf = found.components().collect();
            *path = found.to_string_lossy().into_owned();
            Ok(())
        };
        let mut request = self.clone();
        match &mut request {
            Self::Read { path, .. }
            | Self::Write { path, .. }
            | Self::List { path, .. }
            | Self::Stat { path }
            | Self::MakeDir { path, .. }
            | Self::Remove { path }
            | Self::Watch { path, .. }
            | Self::Pack { path }
            | Self::Unpack { path } => whole(path),
            Self::Rename { from, to } => whole(from).and_then(|()| whole(to)),
        }
        .map_err(|e: io::Error| io::Error::new(e.kind(), format!("the user's home: {e}")))?;
        Ok(request)
    }
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A socket, device or pipe.
    Other,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FileEntry {
    /// Its name.
    pub name: String,
    /// Its path.
    pub path: String,
    /// What it is.
    pub kind: EntryKind,
    /// Bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The owner's name, or its number.
    pub owner: String,
    /// The group's name, or its number.
    pub group: String,
    /// Seconds since 1970 when its contents changed.
    pub modified: i64,
    /// Where a link leads.
    pub symlink_target: Option<String>,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileReply {
    /// Done; so many bytes were written.
    Done(u64),
    /// What was found. Bytes follow a file's entry when they were asked for.
    Entries(Vec<FileEntry>),
}

/// A connection with frames of file data.
struct Channel {
    socket: File,
    input: Vec<u8>,
    /// Data that has arrived and is not read yet.
    ready: io::Cursor<Vec<u8>>,
    ended: bool,
}

impl Channel {
    fn send(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(payload.len() + 8);
        protocol::frame(kind, &[payload], &mut bytes);
        self.socket.write_all(&bytes)
    }

    fn answer(&mut self, answer: &Answer) -> io::Result<()> {
        self.send(kind::ANSWER, &serde_json::to_vec(answer)?)
    }

    fn next_frame(&mut self) -> io::Result<(u8, Vec<u8>)> {
        loop {
            if let Some(frame) = protocol::take_frame(&mut self.input).map_err(io::Error::other)? {
                return Ok(frame);
            }
            let mut bytes = [0; 64 << 10];
            let len = self.socket.read(&mut bytes)?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.input
                .extend_from_slice(bytes.get(..len).unwrap_or_default());
        }
    }
}

/// The data that arrives.
impl Read for Channel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let len = self.ready.read(buffer)?;
            if len > 0 || self.ended || buffer.is_empty() {
                return Ok(len);
            }
            match self.next_frame()? {
                (kind::DATA, bytes) => self.ready = io::Cursor::new(bytes),
                (kind::END, _) => self.ended = true,
                (kind, _) => return Err(io::Error::other(format!("a frame of kind {kind}"))),
            }
        }
    }
}

/// The data that is sent.
impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = bytes
            .get(..bytes.len().min(PIECE_BYTES))
            .unwrap_or_default();
        self.send(kind::DATA, piece)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Does what is asked and answers.
///
/// # Errors
/// When the daemon cannot be told.
pub(crate) fn serve(
    socket: OwnedFd,
    input: Vec<u8>,
    request: &FileRequest,
    user: Option<&str>,
) -> io::Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    rustix::io::ioctl_fionbio(&socket, false)?;
    for which in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, which, Some(PATIENCE))?;
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut channel = Channel {
        socket: socket.into(),
        input,
        ready: io::Cursor::default(),
        ended: false,
    };
    let done = match user {
        None => work(&mut channel, request),
        Some(user) => users::work_as(user)
            .and_then(|()| request.seen_from_here())
            .and_then(|request| work(&mut channel, &request)),
    };
    match done {
        Ok(Some(reply)) => channel.answer(&Answer::Files { reply }),
        Ok(None) => channel.send(kind::END, &[]),
        Err(error) => {
            let failure = match error.kind() {
                io::ErrorKind::NotFound => Failure::NotFound,
                io::ErrorKind::AlreadyExists => Failure::Conflict,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::Exhausted,
                io::ErrorKind::InvalidInput => Failure::Invalid,
                _ => Failure::Refused,
            };
            channel.answer(&Answer::Failed {
                failure,
                message: error.to_string(),
                errno: error.raw_os_error().unwrap_or(0),
            })
        }
    }
}

/// `None` when the answer has been given and data followed.
fn work(channel: &mut Channel, request: &FileRequest) -> io::Result<Option<FileReply>> {
    let done = Ok(Some(FileReply::Done(0)));
    match request {
        FileRequest::Read { path, offset, len } => {
            send_file(channel, Path::new(path), *offset, *len)?;
            Ok(None)
        }
        FileRequest::Write { path, mode } => {
            let written = write_file(channel, Path::new(path), *mode)?;
            Ok(Some(FileReply::Done(written)))
        }
        FileRequest::List { path, depth } => {
            let mut entries = Vec::new();
            list(Path::new(path), *depth, &mut entries)?;
            Ok(Some(FileReply::Entries(entries)))
        }
        FileRequest::Stat { path } => {
            let path = Path::new(path);
            let entry = entry(path, &fs::symlink_metadata(path)?);
            Ok(Some(FileReply::Entries(vec![entry])))
        }
        FileRequest::MakeDir { path, mode } => {
            fs::create_dir_all(path)?;
            if let Some(mode) = mode {
                fs::set_permissions(path, fs::Permissions::from_mode(*mode))?;
            }
            done
        }
        FileRequest::Remove { path } => {
            if fs::symlink_metadata(path)?.is_dir() {
                fs::remove_dir_all(path)?;
            } else {
                fs::remove_file(path)?;
            }
            done
        }
        FileRequest::Rename { from, to } => {
            fs::rename(from, to)?;
            done
        }
        FileRequest::Watch { path, recursive } => {
            let mut watch = Watch::new(Path::new(path), *recursive)?;
            channel.answer(&Answer::Ok)?;
            while let Some(events) = watch.next(&channel.socket)? {
                for event in events {
                    channel.send(kind::DATA, &serde_json::to_vec(&event)?)?;
                }
            }
            Ok(None)
        }
        FileRequest::Pack { path } => {
            let meta = fs::metadata(path)?;
            if !meta.is_dir() {
                return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
            }
            channel.answer(&Answer::Ok)?;
            let buffered = io::BufWriter::with_capacity(PIECE_BYTES, &mut *channel);
            let mut tar = tar::Builder::new(buffered);
            tar.follow_symlinks(false);
            tar.append_dir_all(".", path)?;
            tar.into_inner()?.flush()?;
            Ok(None)
        }
        FileRequest::Unpack { path } => {
            fs::create_dir_all(path)?;
            let mut tar = tar::Archive::new(&mut *channel);
            tar.set_preserve_permissions(true);
            tar.set_preserve_ownerships(true);
            tar.set_unpack_xattrs(true);
            tar.unpack(path)?;
            // What follows the end of the archive, so that the sender is not cut off.
            io::copy(channel, &mut io::sink())?;
            done
        }
    }
}

/// A regular file, opened without waiting for whatever else may be there.
fn open_regular(path: &Path) -> io::Result<(File, fs::Metadata)> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let meta = file.metadata()?;
    if meta.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if !meta.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok((file, meta))
}

fn send_file(channel: &mut Channel, path: &Path, offset: u64, len: Option<u64>) -> io::Result<()> {
    let (mut file, meta) = open_regular(path)?;
    io::Seek::seek(&mut file, io::SeekFrom::Start(offset))?;
    let reply = FileReply::Entries(vec![entry(path, &meta)]);
    channel.answer(&Answer::Files { reply })?;
    let mut limited = file.take(len.unwrap_or(u64::MAX));
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        let len = limited.read(&mut buffer)?;
        if len == 0 {
            return Ok(());
        }
        channel.send(kind::DATA, buffer.get(..len).unwrap_or_default())?;
    }
}

/// Writes beside the file, then takes its place: nobody sees half of it, and a connection that breaks changes nothing.
fn write_file(channel: &mut Channel, path: &Path, mode: Option<u32>) -> io::Result<u64> {
    let target = match fs::canonicalize(path) {
        Ok(real) => real,
        Err(e) if e.kind() == io::ErrorKind::NotFound => path.to_owned(),
        Err(e) => return Err(e),
    };
    let old = fs::symlink_metadata(&target).ok();
    if old.as_ref().is_some_and(fs::Metadata::is_dir) {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    let folder = target.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let temporary = folder.join(format!(".dsec-{}.tmp", std::process::id()));
    let written = (|| {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .open(&temporary)?;
        let len = io::copy(channel, &mut file)?;
        if let Some(old) = &old {
            std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()))?;
        }
        let mode = mode.or(old.as_ref().map(|old| old.mode() & 0o7777));
        file.set_permissions(fs::Permissions::from_mode(mode.unwrap_or(0o644)))?;
        fs::rename(&temporary, &target)?;
        Ok(len)
    })();
    if written.is_err() {
        // It may not exist: then there is nothing to remove.
        drop(fs::remove_file(&temporary));
    }
    written
}

fn list(folder: &Path, depth: u32, entries: &mut Vec<FileEntry>) -> io::Result<()> {
    let mut found: Vec<PathBuf> = Vec::new();
    for item in fs::read_dir(folder)? {
        found.push(item?.path());
        if entries.len() + found.len() > ENTRIES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("more than {ENTRIES_MAX} entries: list a smaller folder"),
            ));
        }
    }
    found.sort();
    for path in found {
        let meta = match fs::symlink_metadata(&path) {
            Ok(meta) => meta,
            // Removed since.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        entries.push(entry(&path, &meta));
        if meta.is_dir() && depth > 1 {
            list(&path, depth - 1, entries)?;
        }
    }
    Ok(())
}

fn entry(path: &Path, meta: &fs::Metadata) -> FileEntry {
    let kind = if meta.is_file() {
        EntryKind::File
    } else if meta.is_dir() {
        EntryKind::Directory
    } else if meta.is_symlink() {
        EntryKind::Symlink
    } else {
        EntryKind::Other
    };
    let target = if kind == EntryKind::Symlink {
        fs::read_link(path).ok()
    } else {
        None
    };
    let name = path.file_name().unwrap_or_default();
    FileEntry {
        name: name.to_string_lossy().into_owned(),
        path: path.to_string_lossy().into_owned(),
        kind,
        size: meta.len(),
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        owner: users::name_of(meta.uid()),
        group: users::name_of_group(meta.gid()),
        modified: meta.mtime(),
        symlink_target: target.map(|t| t.to_string_lossy().into_owned()),
    }
}
