//! What a server is asked on its control socket, `DISK/control`: one request and one reply a connection, a line of JSON each.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;

use imgstore::disk::folder::Lower;
use serde::{Deserialize, Serialize};

use crate::way::Way;

/// Longest request, with its end of line: a restack names up to 254 files.
pub const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Longest reply.
pub const REPLY_BYTES_MAX: u64 = 64 << 10;
/// The socket in the disk's folder.
pub const SOCKET: &str = "control";

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// How it is.
    Status,
    /// Seal what was written as one more layer; I/O goes on.
    Snapshot {
        /// Also where nothing was written since the last one.
        always: bool,
    },
    /// Merge sealed layers, counted from the bottom; I/O goes on.
    Merge {
        /// The lowest of them.
        from: usize,
        /// The first one above them.
        to: usize,
    },
    /// Put equal layers in place of the lowest ones; I/O goes on.
    Restack {
        /// How many are replaced.
        count: usize,
        /// By what, bottom to top.
        lowers: Vec<Lower>,
    },
    /// Flush, take the disk away and end.
    Detach {
        /// Also while it is in use.
        force: bool,
    },
}

/// How a server is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// The disk.
    pub folder: PathBuf,
    /// How the disk is reached.
    pub way: Way,
    /// What a user opens.
    pub path: PathBuf,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Layers that are not written to.
    pub layers: usize,
    /// Bytes written since the last snapshot.
    pub written: u64,
    /// Separate extents of that.
    pub extents: usize,
    /// Clients of the socket.
    pub clients: usize,
}

/// What it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Reply {
    /// How it is.
    Status(Status),
    /// A layer was sealed or merged.
    Layer {
        /// Its file.
        file: PathBuf,
        /// For how many microseconds writes were held.
        held_us: u64,
    },
    /// Done.
    Done,
    /// It was not done, and why.
    Refused(String),
}

/// Sends one message.
///
/// # Errors
/// What the socket said.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Receives one message of at most `max` bytes.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a longer or another one; what the socket said.
pub fn receive<T: for<'de> Deserialize<'de>>(stream: impl Read, max: u64) -> io::Result<T> {
    let mut line = Vec::new();
    BufReader::new(stream.take(max)).read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        let text = format!("expected a line of at most {max} bytes, found an end without one");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(serde_json::from_slice(&line)?)
}
