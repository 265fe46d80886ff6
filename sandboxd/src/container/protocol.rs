//! What daemon and agent say to each other, and the frames it is said in.
//!
//! One connection an operation. A frame is a length (u32, little-endian, of what follows), a kind (u8) and a payload; data
//! frames carry raw bytes, others JSON. The first frame from the daemon is a [`Request`], the first from the agent an
//! [`Answer`]; an exec's output, end and input follow. Because each operation has its own connection, a slow reader holds up
//! itself only, and a daemon that died leaves nothing half said.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most bytes of one frame, its kind included.
pub const FRAME_BYTES_MAX: usize = 512 << 10;

/// Kinds of frames.
pub mod kind {
    /// A request (JSON).
    pub const REQUEST: u8 = b'Q';
    /// An answer (JSON).
    pub const ANSWER: u8 = b'A';
    /// Standard output or a terminal's output: offset (u64, little-endian), then bytes.
    pub const STDOUT: u8 = b'1';
    /// Standard error: as standard output.
    pub const STDERR: u8 = b'2';
    /// Bytes for standard input, or a file's bytes.
    pub const DATA: u8 = b'D';
    /// No more of those.
    pub const END: u8 = b'E';
    /// The end of an exec (JSON).
    pub const EXIT: u8 = b'X';
    /// Nothing happened for a while.
    pub const KEEPALIVE: u8 = b'K';
}

/// A terminal's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    /// Columns.
    #[schema(maximum = 65535)]
    pub cols: u16,
    /// Rows.
    #[schema(maximum = 65535)]
    pub rows: u16,
}

/// What to run, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExecSpec {
    /// Its name; starting a name again attaches to what runs under it, and never runs it twice.
    pub exec_id: String,
    /// Program and arguments. The program is looked for in the environment's PATH.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Working directory; `~` is the user's home, and `/` where that is missing.
    pub cwd: String,
    /// `user`, `user:group`, or numbers.
    pub user: String,
    /// Milliseconds until everything that it started is killed; 0 = never.
    pub timeout_ms: u64,
    /// Whether input follows; without it standard input is empty.
    pub stdin: bool,
    /// A terminal of this size in place of pipes.
    pub pty: Option<TerminalSize>,
    /// Most open files of each process.
    pub open_files: u64,
}

/// What the daemon asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Take the root file system that comes with this message as a descriptor, and begin to live in it.
    Assign {
        /// Name of the machine that processes see.
        hostname: String,
    },
    /// Whether it is there, and what it has.
    Ping,
    /// Start something (or attach to it).
    Exec {
        /// What.
        spec: Box<ExecSpec>,
        /// Send output as it comes and never faster than it is read; otherwise the kept output comes at the end.
        stream: bool,
        /// It may have been started before: if the agent cannot know that it was not, it is not started.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        resumed: bool,
    },
    /// Follow an exec from these offsets.
    Attach {
        /// Which.
        exec_id: String,
        /// From which byte of standard output.
        stdout_from: u64,
        /// From which byte of standard error.
        stderr_from: u64,
        /// As for [`Request::Exec`].
        stream: bool,
    },
    /// Write to an exec's standard input: DATA frames, perhaps END.
    Stdin {
        /// Which.
        exec_id: String,
    },
    /// Send a signal to an exec's main process, or kill all of it.
    Signal {
        /// Which.
        exec_id: String,
        /// The signal's number.
        signal: i32,
        /// Everything that the exec started (SIGKILL only).
        tree: bool,
    },
    /// Change a terminal's size.
    Resize {
        /// Which.
        exec_id: String,
        /// The size.
        size: TerminalSize,
    },
    /// All execs that are remembered.
    List,
    /// Work on files.
    Files {
        /// What.
        request: super::files::FileRequest,
        /// As whom, from whose home; without one as root, from `/`.
        #[serde(default)]
        user: Option<String>,
    },
    /// Connect to a port of the sandbox's loopback; the answer brings the connection as a descriptor.
    Dial {
        /// Which.
        port: u16,
    },
}

impl Request {
    /// Work on files as root.
    pub fn files(request: super::files::FileRequest) -> Self {
        Self::files_as(request, None)
    }

    /// The same as a user of the sandbox.
    pub fn files_as(request: super::files::FileRequest, user: Option<String>) -> Self {
        Self::Files { request, user }
    }
}

/// What the agent says to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// Done, or begun.
    Ok,
    /// An exec runs or ran.
    Started {
        /// Its process, as the sandbox sees it.
        pid: i32,
        /// Whether it had been started before.
        again: bool,
    },
    /// To [`Request::List`].
    Execs {
        /// By start.
        execs: Vec<ExecInfo>,
    },
    /// Work on files was done.
    Files {
        /// What was found.
        reply: super::files::FileReply,
    },
    /// It was not done.
    Failed {
        /// What the caller can do.
        failure: Failure,
        /// What happened, for people.
        message: String,
        /// The error number, if the kernel refused.
        errno: i32,
    },
}

/// Kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The request is wrong.
    Invalid,
    /// No such exec or file.
    NotFound,
    /// It is there already.
    Conflict,
    /// A limit is reached.
    Exhausted,
    /// The sandbox's own file system or kernel refused.
    Refused,
    /// Our own machinery failed.
    Internal,
    /// It was done once, and what became of it is not remembered.
    Forgotten,
}

/// How an exec ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its main process ended by itself, with a status.
    UserExit,
    /// A signal ended it.
    Signal,
    /// Its time was over; everything that it started was killed.
    TimedOut,
    /// The kernel killed it for lack of memory.
    Oom,
    /// The program could not be started.
    NotStarted,
    /// The sandbox ended meanwhile.
    SandboxGone,
    /// Our own machinery failed: nothing is known of what it did.
    InfraFailed,
}

/// An exec's end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Exit {
    /// How.
    pub outcome: Outcome,
    /// The status: as a shell shows it (128 + signal).
    pub exit_code: i32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Bytes that standard output was in all.
    pub stdout_bytes: u64,
    /// Bytes that standard error was in all.
    pub stderr_bytes: u64,
    /// A process that it left behind can still write to its output.
    pub open_streams: bool,
    /// Why it did not start, or failed.
    pub message: Option<String>,
    /// Milliseconds from start to end.
    pub duration_ms: u64,
}

/// One exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ExecInfo {
    /// Its name.
    pub exec_id: String,
    /// Its process, as the sandbox sees it.
    pub pid: i32,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Whether it has a terminal.
    pub pty: bool,
    /// Its end, if it has ended.
    pub exit: Option<Exit>,
}

/// A frame's bytes.
///
/// # Panics
/// Never for payloads below [`FRAME_BYTES_MAX`], which all of ours are.
pub(crate) fn frame(kind: u8, parts: &[&[u8]], out: &mut Vec<u8>) {
    let len: usize = 1 + parts.iter().map(|part| part.len()).sum::<usize>();
    let len = u32::try_from(len).expect("frames are short");
    out.extend_from_slice(&len.to_le_bytes());
    out.push(kind);
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Takes the first whole frame off `input`; `None` when there is none yet.
///
/// # Errors
/// When the bytes are no frame.
pub(crate) fn take_frame(input: &mut Vec<u8>) -> Result<Option<(u8, Vec<u8>)>, BadFrame> {
    let Some((head, _)) = input.split_first_chunk::<4>() else {
        return Ok(None);
    };
    let len = usize::try_from(u32::from_le_bytes(*head)).unwrap_or(usize::MAX);
    if len == 0 || len > FRAME_BYTES_MAX {
        return Err(BadFrame(len));
    }
    if input.len() < 4 + len {
        return Ok(None);
    }
    let rest = input.split_off(4 + len);
    let whole = std::mem::replace(input, rest);
    let payload = whole.get(5..).unwrap_or_default().to_vec();
    let kind = whole.get(4).copied().unwrap_or_default();
    Ok(Some((kind, payload)))
}

/// Bytes that are no frame.
#[derive(Debug, thiserror::Error)]
#[error("a frame of {0} bytes; 1 to {FRAME_BYTES_MAX} are expected")]
pub(crate) struct BadFrame(usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_whole_however_they_arrive() {
        let mut bytes = Vec::new();
        frame(kind::DATA, &[b"ab", b"c"], &mut bytes);
        frame(kind::END, &[], &mut bytes);
        let mut input = Vec::new();
        let mut found = Vec::new();
        for byte in bytes {
            input.push(byte);
            found.extend(take_frame(&mut input).unwrap());
        }
        assert_eq!(found, [(kind::DATA, b"abc".to_vec()), (kind::END, vec![])]);
        assert!(take_frame(&mut vec![0, 0, 0, 0]).is_err());
        assert!(take_frame(&mut vec![0, 0, 0, 1]).is_err());
    }
}
