//! Trajectories: for each sandbox a durable, totally ordered log of requests and results.
//!
//! A request is written down before anything is done about it, its result afterwards. So a request that is sent again
//! gets what was recorded, one that runs is waited for, and one that a crash of the daemon left without a result is known
//! to be that. What is written is the kernel's but not synced: a daemon that is killed loses none, and a machine that
//! loses power has lost the sandboxes too (and may have lost the last entries, never ones in the middle).
//!
//! One RocksDB holds all of them, behind this module. Keys: `e/ID/SEQ` events, `r/ID/REQUEST` which events a request id stands
//! for, `o/ID/REQUEST` requests without a result, `b/ID/SEQ` bodies of bytes,
//! `u/ID/SEQ` digests of larger ones (see `uploads`), `m/ID` counts.

pub mod event;
mod uploads;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rocksdb::{DB, Direction, IteratorMode, Options, WriteBatch};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use uploads::{Incoming, KEPT_BYTES_MAX};

use event::{Asked, Event, Finished, Outcome, Upload, What};
use uploads::Uploads;

/// Bytes of one sandbox's trajectory above which it takes no more requests.
pub const BYTES_MAX: u64 = 1 << 30;
/// Most bytes of an uploaded body that are kept in the database; larger ones are files.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// Most bytes of a request's id.
pub const REQUEST_ID_BYTES_MAX: usize = 256;
/// Most events of one answer.
const EVENTS_MAX: usize = 1000;
/// Bytes of events of one answer above which it ends.
const ANSWER_BYTES: usize = 4 << 20;

/// Why the log did not do something.
#[derive(Debug, thiserror::Error)]
pub enum TrajectoryError {
    /// The database would not.
    #[error("the trajectories: {0}")]
    Database(#[from] rocksdb::Error),
    /// An entry is not what was written.
    #[error("the trajectories: entry `{key}` makes no sense: {source}")]
    Corrupt {
        /// Which.
        key: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// An entry that another names is missing.
    #[error("the trajectories: entry `{key}` is missing")]
    Missing {
        /// Which.
        key: String,
    },
    /// It is full.
    #[error(
        "the trajectory of sandbox `{sandbox}` has {bytes} bytes, the most that it may is {BYTES_MAX}: go on in another sandbox"
    )]
    Full {
        /// Whose.
        sandbox: String,
        /// How large it is.
        bytes: u64,
    },
    /// A large upload would not be kept or read.
    #[error("the uploads of sandbox `{sandbox}`: {source}")]
    Upload {
        /// Whose.
        sandbox: String,
        /// What the disk said.
        #[source]
        source: std::io::Error,
    },
    /// The id cannot be one.
    #[error(
        "`request_id` of {len} bytes: 1 to {REQUEST_ID_BYTES_MAX} without control characters are expected"
    )]
    BadId {
        /// Its length.
        len: usize,
    },
    /// The id stands for something else.
    #[error("request `{request_id}` was `{first}`, and is now `{now}`: use another id")]
    Differs {
        /// The id.
        request_id: String,
        /// What it was first.
        first: String,
        /// What it is now.
        now: String,
    },
}

/// What is known of a request when it arrives.
#[derive(Debug)]
pub enum Begun {
    /// It is new and written down now. Carry it out, then [`Trajectory::finish`] it.
    New(Ticket),
    /// It has a result.
    Done(Finished),
    /// It is being carried out.
    Running(watch::Receiver<()>),
    /// It was begun, and nobody carries it out now.
    Open(Ticket),
}

/// A request that has no result yet.
#[derive(Debug, Clone)]
pub struct Ticket {
    /// Whose.
    pub sandbox: String,
    /// Its id.
    pub request_id: String,
    /// Its number.
    pub seq: u64,
}

/// What a request id stands for.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Index {
    request: u64,
    result: Option<u64>,
}

/// What is known of one trajectory.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Counts {
    events: u64,
    bytes: u64,
    /// Bytes of large uploads.
    #[serde(default)]
    uploads: u64,
}

/// The bytes that a request came with, as far as they can be kept.
#[derive(Debug)]
pub enum Came {
    /// All of them.
    Bytes(Vec<u8>),
    /// All of them, in a file.
    File(Incoming),
    /// Too many.
    Nothing,
}

/// The bytes that a request came with.
#[derive(Debug, PartialEq, Eq)]
pub enum Kept {
    /// All of them.
    Bytes(Vec<u8>),
    /// Where they are.
    File(PathBuf),
}

#[derive(Debug, Default)]
struct Log {
    counts: Option<Counts>,
    running: HashMap<String, watch::Sender<()>>,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Trajectory {
    db: DB,
    uploads: Uploads,
    logs: Mutex<HashMap<String, Arc<Mutex<Log>>>>,
}

/// Key and value.
type Entry = Result<(Box<[u8]>, Box<[u8]>), rocksdb::Error>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn event_key(sandbox: &str, seq: u64) -> String {
    format!("e/{sandbox}/{seq:020}")
}

fn body_key(sandbox: &str, seq: u64) -> String {
    format!("b/{sandbox}/{seq:020}")
}

fn upload_key(sandbox: &str, seq: u64) -> String {
    format!("u/{sandbox}/{seq:020}")
}

fn index_key(sandbox: &str, request_id: &str) -> String {
    format!("r/{sandbox}/{request_id}")
}

fn open_key(sandbox: &str, request_id: &str) -> String {
    format!("o/{sandbox}/{request_id}")
}

fn counts_key(sandbox: &str) -> String {
    format!("m/{sandbox}")
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("our own types have a form in JSON")
}

impl Trajectory {
    /// Opens (or makes) the database in `folder`, and a folder for large uploads.
    ///
    /// # Errors
    /// What it says; another process that has it open is one reason.
    pub fn open(folder: &Path, uploads: &Path) -> Result<Self, TrajectoryError> {
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_write_buffer_size(4 << 20);
        options.set_max_write_buffer_number(2);
        options.set_max_open_files(64);
        options.set_keep_log_file_num(2);
        options.set_max_background_jobs(2);
        Ok(Self {
            db: DB::open(&options, folder)?,
            uploads: Uploads::open(uploads).map_err(|source| TrajectoryError::Upload {
                sandbox: String::new(),
                source,
            })?,
            logs: Mutex::default(),
        })
    }

    fn log(&self, sandbox: &str) -> Arc<Mutex<Log>> {
        Arc::clone(locked(&self.logs).entry(sandbox.to_owned()).or_default())
    }

    fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, TrajectoryError> {
        let Some(bytes) = self.db.get_pinned(key)? else {
            return Ok(None);
        };
        let read = serde_json::from_slice(&bytes);
        read.map(Some).map_err(|source| TrajectoryError::Corrupt {
            key: key.to_owned(),
            source,
        })
    }

    fn event(&self, sandbox: &str, seq: u64) -> Result<Event, TrajectoryError> {
        let key = event_key(sandbox, seq);
        self.read(&key)?.ok_or(TrajectoryError::Missing { key })
    }

    /// Adds an event, and whatever else `batch` holds, at a stroke. The caller holds the log.
    fn append(
        &self,
        sandbox: &str,
        log: &mut Log,
        (what, mut batch): (What, WriteBatch),
    ) -> Result<u64, TrajectoryError> {
        let before = self.counts(sandbox, log)?;
        let event = Event {
            seq: before.events + 1,
            at_ms: crate::sandboxes::now_ms(),
            what,
        };
        let bytes = encode(&event);
        let added = batch.size_in_bytes() + bytes.len();
        let after = Counts {
            events: event.seq,
            bytes: before.bytes + added as u64,
            uploads: before.uploads,
        };
        batch.put(event_key(sandbox, event.seq), bytes);
        batch.put(counts_key(sandbox), encode(&after));
        // The kernel has it then, so a killed daemon loses nothing. A machine that loses power has lost its sandboxes too.
        self.db.write(batch)?;
        log.counts = Some(after);
        Ok(event.seq)
    }

    fn counts(&self, sandbox: &str, log: &mut Log) -> Result<Counts, TrajectoryError> {
        let known = match log.counts.take() {
            Some(known) => known,
            None => self.read(&counts_key(sandbox))?.unwrap_or_default(),
        };
        let copy = Counts { ..known };
        log.counts = Some(known);
        Ok(copy)
    }

    /// Writes a request down, unless it is known. Blocks.
    ///
    /// # Errors
    /// [`TrajectoryError::Differs`] when the id was used for something else; [`TrajectoryError::Full`]; what the disk says.
    pub fn begin(
        &self,
        sandbox: &str,
        request_id: &str,
        asked: Asked,
    ) -> Result<Begun, TrajectoryError> {
        let len = request_id.len();
        if len == 0 || len > REQUEST_ID_BYTES_MAX || request_id.chars().any(char::is_control) {
            return Err(TrajectoryError::BadId { len });
        }
        let log = self.log(sandbox);
        let mut log = locked(&log);
        let ticket = |seq| Ticket {
            sandbox: sandbox.to_owned(),
            request_id: request_id.to_owned(),
            seq,
        };
        if let Some(index) = self.read::<Index>(&index_key(sandbox, request_id))? {
            self.same(sandbox, request_id, (index.request, &asked))?;
            if let Some(result) = index.result {
                return match self.event(sandbox, result)?.what {
                    What::Result(finished) => Ok(Begun::Done(finished)),
                    _ => Err(TrajectoryError::Missing {
                        key: event_key(sandbox, result),
                    }),
                };
            }
            return Ok(match log.running.get(request_id) {
                Some(running) => Begun::Running(running.subscribe()),
                None => Begun::Open(self.take_up(&mut log, ticket(index.request))),
            });
        }
        let bytes = self.counts(sandbox, &mut log)?.bytes;
        if bytes >= BYTES_MAX {
            let sandbox = sandbox.to_owned();
            return Err(TrajectoryError::Full { sandbox, bytes });
        }
        let request = self.counts(sandbox, &mut log)?.events + 1;
        let index = Index {
            request,
            result: None,
        };
        let mut batch = WriteBatch::default();
        batch.put(index_key(sandbox, request_id), encode(&index));
        batch.put(open_key(sandbox, request_id), encode(&request));
        let what = What::Request {
            request_id: request_id.to_owned(),
            asked,
        };
        let seq = self.append(sandbox, &mut log, (what, batch))?;
        Ok(Begun::New(self.take_up(&mut log, ticket(seq))))
    }

    fn take_up(&self, log: &mut Log, ticket: Ticket) -> Ticket {
        let (sender, _) = watch::channel(());
        log.running.insert(ticket.request_id.clone(), sender);
        ticket
    }

    fn same(
        &self,
        sandbox: &str,
        request_id: &str,
        (seq, now): (u64, &Asked),
    ) -> Result<(), TrajectoryError> {
        let tell = |asked: &Asked| {
            let body = asked.body.as_ref().map(ToString::to_string);
            let mut text = format!(
                "{} {} {}",
                asked.method,
                asked.path,
                body.unwrap_or_default()
            );
            if let Some((end, _)) = text.char_indices().nth(200) {
                text.truncate(end);
                text.push('…');
            }
            text
        };
        match self.event(sandbox, seq)?.what {
            What::Request { asked, .. } if asked == *now => Ok(()),
            What::Request { asked, .. } => Err(TrajectoryError::Differs {
                request_id: request_id.to_owned(),
                first: tell(&asked),
                now: tell(now),
            }),
            _ => Err(TrajectoryError::Missing {
                key: event_key(sandbox, seq),
            }),
        }
    }

    /// Writes down what became of a request. One that was not done may be sent again. Blocks.
    ///
    /// # Errors
    /// What the disk says: the request stays without a result then.
    pub fn finish(
        &self,
        ticket: &Ticket,
        (outcome, status, reply): (Outcome, u16, serde_json::Value),
        body: Option<(Upload, Came)>,
    ) -> Result<Finished, TrajectoryError> {
        let (sandbox, request_id) = (&*ticket.sandbox, &*ticket.request_id);
        let log = self.log(sandbox);
        let mut log = locked(&log);
        let mut batch = WriteBatch::default();
        let mut upload = None;
        if let Some((mut told, came)) = body {
            told.kept = self.keep(ticket, &mut log, (&told, came), &mut batch)?;
            upload = Some(told);
        }
        let finished = Finished {
            of: ticket.seq,
            outcome,
            status,
            reply,
            upload,
        };
        batch.delete(open_key(sandbox, request_id));
        if outcome == Outcome::NotDone {
            batch.delete(index_key(sandbox, request_id));
        } else {
            let index = Index {
                request: ticket.seq,
                result: Some(self.counts(sandbox, &mut log)?.events + 1),
            };
            batch.put(index_key(sandbox, request_id), encode(&index));
        }
        let what = What::Result(finished.clone());
        let written = self.append(sandbox, &mut log, (what, batch));
        log.running.remove(request_id);
        written.map(|_| finished)
    }

    /// Keeps an upload; whether all of it is.
    fn keep(
        &self,
        ticket: &Ticket,
        log: &mut Log,
        (told, came): (&Upload, Came),
        batch: &mut WriteBatch,
    ) -> Result<bool, TrajectoryError> {
        let sandbox = &*ticket.sandbox;
        match came {
            Came::Bytes(bytes) => batch.put(body_key(sandbox, ticket.seq), bytes),
            Came::File(incoming) => {
                let kept = self.uploads.keep(sandbox, &told.digest, &incoming);
                let new = kept.map_err(|source| TrajectoryError::Upload {
                    sandbox: sandbox.to_owned(),
                    source,
                })?;
                batch.put(upload_key(sandbox, ticket.seq), told.digest.as_bytes());
                let mut counts = self.counts(sandbox, log)?;
                counts.uploads += if new { told.bytes } else { 0 };
                log.counts = Some(counts);
            }
            Came::Nothing => return Ok(false),
        }
        Ok(true)
    }

    /// A place for an upload that is too large for the database. Blocks, but for moments only.
    ///
    /// # Errors
    /// What the disk says.
    pub fn incoming(&self, sandbox: &str) -> Result<Incoming, TrajectoryError> {
        let log = self.log(sandbox);
        let used = self.counts(sandbox, &mut locked(&log))?.uploads;
        let begun = self
            .uploads
            .begin(sandbox, KEPT_BYTES_MAX.saturating_sub(used));
        begun.map_err(|source| TrajectoryError::Upload {
            sandbox: sandbox.to_owned(),
            source,
        })
    }

    /// Nobody carries the request out any more, and what became of it can still be found out: the next who sends it does.
    pub fn leave_open(&self, ticket: &Ticket) {
        let log = self.log(&ticket.sandbox);
        locked(&log).running.remove(&ticket.request_id);
    }

    /// Ends when a request that is being carried out is not any more; `None` if it is not.
    pub fn running(&self, sandbox: &str, request_id: &str) -> Option<watch::Receiver<()>> {
        let log = self.log(sandbox);
        let running = locked(&log).running.get(request_id)?.subscribe();
        Some(running)
    }

    /// What is known of an id, without taking anything up.
    ///
    /// # Errors
    /// What the disk says.
    pub fn result(
        &self,
        sandbox: &str,
        request_id: &str,
    ) -> Result<Option<Finished>, TrajectoryError> {
        let index = self.read::<Index>(&index_key(sandbox, request_id))?;
        let Some(result) = index.and_then(|index| index.result) else {
            return Ok(None);
        };
        match self.event(sandbox, result)?.what {
            What::Result(finished) => Ok(Some(finished)),
            _ => Ok(None),
        }
    }

    /// Takes up the requests that an earlier run left without a result. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn open_requests(&self, sandbox: &str) -> Result<Vec<(Ticket, Asked)>, TrajectoryError> {
        let prefix = format!("o/{sandbox}/");
        let mut found = Vec::new();
        for entry in self.from(&prefix, &prefix) {
            let (key, value) = entry?;
            let request_id = String::from_utf8_lossy(key.get(prefix.len()..).unwrap_or_default());
            let seq =
                serde_json::from_slice(&value).map_err(|source| TrajectoryError::Corrupt {
                    key: String::from_utf8_lossy(&key).into_owned(),
                    source,
                })?;
            let ticket = Ticket {
                sandbox: sandbox.to_owned(),
                request_id: request_id.into_owned(),
                seq,
            };
            if let What::Request { asked, .. } = self.event(sandbox, seq)?.what {
                found.push((ticket, asked));
            }
        }
        Ok(found)
    }

    /// Takes one of those up, unless somebody has.
    pub fn resume(&self, ticket: &Ticket) -> bool {
        let log = self.log(&ticket.sandbox);
        let mut log = locked(&log);
        let mine = !log.running.contains_key(&ticket.request_id);
        if mine {
            self.take_up(&mut log, ticket.clone());
        }
        mine
    }

    /// Adds a request and its result at once, for what the caller has written down elsewhere before it began. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn add(
        &self,
        sandbox: &str,
        request_id: &str,
        asked: Asked,
        reply: serde_json::Value,
    ) -> Result<(), TrajectoryError> {
        let log = self.log(sandbox);
        let mut log = locked(&log);
        let request = What::Request {
            request_id: request_id.to_owned(),
            asked,
        };
        let of = self.append(sandbox, &mut log, (request, WriteBatch::default()))?;
        let result = What::Result(Finished {
            of,
            outcome: Outcome::Done,
            status: 201,
            reply,
            upload: None,
        });
        self.append(sandbox, &mut log, (result, WriteBatch::default()))?;
        Ok(())
    }

    /// Writes down that a sandbox ended. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn ended(&self, sandbox: &str, reason: &str) -> Result<(), TrajectoryError> {
        let log = self.log(sandbox);
        let mut log = locked(&log);
        let reason = reason.to_owned();
        let what = What::Ended { reason };
        self.append(sandbox, &mut log, (what, WriteBatch::default()))?;
        Ok(())
    }

    /// Entries whose keys begin with `prefix`, from `first` on.
    fn from<'a>(&'a self, first: &'a str, prefix: &'a str) -> impl Iterator<Item = Entry> + 'a {
        let mode = IteratorMode::From(first.as_bytes(), Direction::Forward);
        let entries = self.db.iterator(mode);
        entries.take_while(move |entry| {
            entry
                .as_ref()
                .map_or(true, |(key, _)| key.starts_with(prefix.as_bytes()))
        })
    }

    /// Events from number `from` on, as many as fit into an answer, and where the rest begins. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn events(
        &self,
        sandbox: &str,
        from: u64,
        limit: usize,
    ) -> Result<(Vec<Event>, Option<u64>), TrajectoryError> {
        let (first, prefix) = (event_key(sandbox, from), format!("e/{sandbox}/"));
        let (mut events, mut bytes) = (Vec::new(), 0);
        for entry in self.from(&first, &prefix) {
            let (key, value) = entry?;
            let event: Event =
                serde_json::from_slice(&value).map_err(|source| TrajectoryError::Corrupt {
                    key: String::from_utf8_lossy(&key).into_owned(),
                    source,
                })?;
            if events.len() >= limit.min(EVENTS_MAX) || bytes > ANSWER_BYTES {
                return Ok((events, Some(event.seq)));
            }
            bytes += value.len();
            events.push(event);
        }
        Ok((events, None))
    }

    /// An uploaded body that was kept. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn body(&self, sandbox: &str, seq: u64) -> Result<Option<Kept>, TrajectoryError> {
        if let Some(bytes) = self.db.get(body_key(sandbox, seq))? {
            return Ok(Some(Kept::Bytes(bytes)));
        }
        let digest = self.db.get(upload_key(sandbox, seq))?;
        Ok(digest.map(|digest| {
            let digest = String::from_utf8_lossy(&digest);
            Kept::File(self.uploads.path(sandbox, &digest))
        }))
    }

    /// Removes all of a sandbox. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn forget(&self, sandbox: &str) -> Result<(), TrajectoryError> {
        locked(&self.logs).remove(sandbox);
        let mut batch = WriteBatch::default();
        self.uploads
            .forget(sandbox)
            .map_err(|source| TrajectoryError::Upload {
                sandbox: sandbox.to_owned(),
                source,
            })?;
        for kind in ["e", "r", "o", "b", "u"] {
            // `0` is the byte after `/`.
            batch.delete_range(
                format!("{kind}/{sandbox}/").into_bytes(),
                format!("{kind}/{sandbox}0").into_bytes(),
            );
        }
        batch.delete(counts_key(sandbox));
        Ok(self.db.write(batch)?)
    }

    /// Sandboxes that have a trajectory. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub fn sandboxes(&self) -> Result<Vec<String>, TrajectoryError> {
        let mut found = Vec::new();
        for entry in self.from("m/", "m/") {
            let (key, _) = entry?;
            found.push(String::from_utf8_lossy(key.get(2..).unwrap_or_default()).into_owned());
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
