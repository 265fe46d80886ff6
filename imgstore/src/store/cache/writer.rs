//! The writing half of the cache: bounded in bytes, and never the cause of a full disk. Used by the control process.
//!
//! ```text
//! put ─► in the books ─► room? ── evict the oldest ──► write tmp/… ─► rename ─► in the books as a segment
//!                          └─ none: not kept, and the disk is left alone for a moment
//! ```
//! One thread evicts at a time. Whoever finds the sum above the limit waits for it, so no file is written while the sum
//! (which is never less than what is on disk, see `ledger`) is above the limit. Until the scan is done nobody waits: an old
//! cache may have very much to evict, which is the scan's work. Room that is not there then is not taken.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::disk::{CacheDisk, Space};
use super::error::CacheError;
use super::files::SegmentFiles;
use super::health::{DiskState, Health};
use super::ledger::{Ledger, Usage, Victim, Wanted};
use super::lock::CacheLock;
use super::pins::{self, Pin};
use super::settings::{CacheDeeds, CacheSettings, Deeds, Kept};
use super::{marker, names};
use crate::ids::{BLOCK_SIZE, Digest, round_up_to_block, to_u64};

/// Free space that is left to others unless told otherwise: at most this many bytes ...
const RESERVE_BYTES_MAX: u64 = 512 << 20;
/// ... and at most this part of the file system.
const RESERVE_PART: u64 = 20;
/// Eviction makes room for this part of the limit (or of the reserve) at once, so that it is rare.
const EVICT_PART: u64 = 20;

/// Folders grow slowly: they are measured again after so many files went at once.
const MEASURE_EVERY: usize = 16;

/// See the head of this file.
#[derive(Debug)]
pub struct SegmentCache {
    pub(super) root: PathBuf,
    pub(super) disk: Arc<dyn CacheDisk>,
    pub(super) files: SegmentFiles,
    settings: CacheSettings,
    /// Part of the names of this run's temporary files.
    pub(super) run: u64,
    /// Whether temporary files of the time before the marker are ours.
    pub(super) old_tmp: bool,
    next_tmp: AtomicU64,
    ledger: Mutex<Ledger>,
    /// A victim's files are gone.
    freed: Condvar,
    pub(super) evictor: Mutex<()>,
    health: Mutex<Health>,
    pub(super) pins: Mutex<Vec<Pin>>,
    /// Which folders of segments there are.
    shards: Mutex<Vec<bool>>,
    pub(super) deeds: Deeds,
    _lock: CacheLock,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn micros_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    })
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// The evictor's right to unlink.
pub(super) type Evicting<'a> = MutexGuard<'a, ()>;

impl SegmentCache {
    /// Opens (and creates) the cache that `lock` is for. Nothing is counted and nothing removed yet: that is
    /// [`SegmentCache::scan`]'s, in the background.
    ///
    /// # Errors
    /// [`CacheError::Format`] for a folder of another version; [`CacheError::Open`] names what cannot be used.
    pub fn open(
        root: &Path,
        lock: CacheLock,
        settings: CacheSettings,
        disk: Arc<dyn CacheDisk>,
    ) -> Result<Self, CacheError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CacheError::Open { path, source }
        };
        let marker = marker::read(&*disk, root)?;
        for name in [names::SEGMENTS, names::TMP, names::LAYERS, names::PINS] {
            let folder = root.join(name);
            disk.create_folder(&folder).map_err(failed(&folder))?;
        }
        let now = micros_now();
        let cache = Self {
            files: SegmentFiles::on(root, Arc::clone(&disk)),
            root: root.to_owned(),
            disk,
            settings,
            run: now ^ (u64::from(std::process::id()) << 44),
            old_tmp: marker == marker::Found::None,
            next_tmp: AtomicU64::new(0),
            ledger: Mutex::new(Ledger::new(now, settings.files_max)),
            freed: Condvar::new(),
            evictor: Mutex::new(()),
            health: Mutex::default(),
            pins: Mutex::default(),
            shards: Mutex::default(),
            deeds: Deeds::default(),
            _lock: lock,
        };
        if marker == marker::Found::None {
            let path = root.join(names::MARKER);
            match marker::replace(
                &*cache.disk,
                &cache.tmp(),
                &path,
                &marker::bytes(marker::FORMAT),
            ) {
                // A full disk must not keep a host from starting; the next start writes it.
                Err(error) if is_full(&error) => {
                    tracing::warn!(path = %path.display(), %error, "the cache has no marker yet");
                }
                written => written.map_err(failed(&path))?,
            }
        }
        cache.measure();
        let folder = root.join(names::PINS);
        for pin in pins::load(&*cache.disk, root).map_err(failed(&folder))? {
            cache.hold_pin(pin);
        }
        Ok(cache)
    }

    /// The reading half.
    pub const fn files(&self) -> &SegmentFiles {
        &self.files
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    /// The limit in bytes.
    pub const fn bytes_max(&self) -> u64 {
        self.settings.bytes_max
    }

    /// What is counted now.
    pub fn usage(&self) -> Usage {
        self.ledger().usage()
    }

    /// Bytes that can be added before the limit says that something must go.
    pub fn bytes_left(&self) -> u64 {
        self.settings.bytes_max.saturating_sub(self.usage().bytes)
    }

    /// What was done, and how the disk is.
    pub fn deeds(&self) -> CacheDeeds {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheDeeds {
            evicted: count(&self.deeds.evicted),
            evicted_layers: count(&self.deeds.evicted_layers),
            not_kept: count(&self.deeds.not_kept),
            errors: count(&self.deeds.errors),
            scanned: self.is_scanned(),
            disk: lock(&self.health).state(),
        }
    }

    /// Notes that these segments were read just now.
    pub fn touch(&self, digests: &[Digest]) {
        let mut ledger = self.ledger();
        for digest in digests {
            ledger.touch(digest);
        }
    }

    /// Counted bytes of a segment that is in the cache.
    pub fn segment_bytes(&self, digest: &Digest) -> Option<u64> {
        self.ledger().segment(digest)
    }

    pub(super) fn tmp(&self) -> PathBuf {
        let number = self.next_tmp.fetch_add(1, Ordering::Relaxed);
        self.root
            .join(names::TMP)
            .join(names::tmp_name(self.run, number))
    }

    /// Counts what folders and our own small files take.
    pub(super) fn measure(&self) {
        let mut shards = Vec::with_capacity(256);
        let mut bytes = 0;
        for byte in 0..=u8::MAX {
            let path = self.shard_path(byte);
            let stat = self.disk.stat(&path).ok().flatten();
            shards.push(stat.is_some());
            bytes += stat.map_or(0, |stat| stat.bytes);
        }
        let own = [
            names::SEGMENTS,
            names::TMP,
            names::LAYERS,
            names::PINS,
            names::MARKER,
            names::LOCK,
        ];
        let mut pins = Vec::new();
        let folder = self.root.join(names::PINS);
        let mut is_pin = |name: &str| {
            if names::pin(name).is_some() {
                pins.push(folder.join(name));
            }
        };
        if let Err(error) = self.disk.list(&folder, &mut is_pin) {
            tracing::debug!(%error, "pins are not counted");
        }
        for path in own.iter().map(|name| self.root.join(name)).chain(pins) {
            // A disk that cannot tell has other troubles than these few blocks.
            bytes += self.disk.stat(&path).ok().flatten().map_or(0, |s| s.bytes);
        }
        *lock(&self.shards) = shards;
        self.ledger().set_fixed(bytes);
    }

    pub(super) fn shard_path(&self, byte: u8) -> PathBuf {
        let segments = self.root.join(names::SEGMENTS);
        segments.join(names::shard_name(byte))
    }

    /// Bytes that putting a segment costs beside its file: the folder, if it is the first in it.
    fn folder_bytes(&self, digest: &Digest) -> u64 {
        let byte = digest.as_bytes().first().copied().unwrap_or_default();
        let there = lock(&self.shards).get(usize::from(byte)).copied();
        if there.unwrap_or_default() {
            0
        } else {
            BLOCK_SIZE
        }
    }

    /// Keeps the frame of `digest`, replacing whatever file has its name, and evicting others if the limit or the reserve asks
    /// for it. It is counted before it is written, so that many writers together do not pass the limit.
    ///
    /// # Errors
    /// Why it is not kept; nothing is left behind then.
    pub fn put(&self, digest: &Digest, frame: &[u8]) -> Result<Kept, CacheError> {
        let kept = self.put_or_not(digest, frame);
        if !matches!(kept, Ok(Kept::Yes)) {
            self.deeds.not_kept.fetch_add(1, Ordering::Relaxed);
        }
        kept
    }

    fn put_or_not(&self, digest: &Digest, frame: &[u8]) -> Result<Kept, CacheError> {
        let bytes = round_up_to_block(to_u64(frame.len()));
        if bytes > self.settings.bytes_max {
            return Ok(Kept::No);
        }
        let alone = {
            let mut health = lock(&self.health);
            (!health.may_ask(Instant::now())).then(|| health.state())
        };
        if let Some(state) = alone {
            return Err(CacheError::LeftAlone {
                digest: *digest,
                path: self.root.clone(),
                state: if state == DiskState::Failing {
                    "failing"
                } else {
                    "full"
                },
            });
        }
        if !self.is_scanned() && self.ledger().is_leaving(digest) {
            return Ok(Kept::No);
        }
        let reserved = bytes + self.folder_bytes(digest);
        self.reserve(*digest, reserved);
        let written = self.put_reserved(digest, frame, bytes);
        let kept = written.as_ref().ok().copied().flatten();
        self.ledger().settle(digest, reserved, kept);
        written.map(|bytes| bytes.map_or(Kept::No, |_| Kept::Yes))
    }

    /// Counts a file that will be written, once nobody is unlinking one with its name.
    pub(super) fn reserve(&self, digest: Digest, bytes: u64) {
        let mut ledger = self.ledger();
        while ledger.is_leaving(&digest) {
            let waited = self.freed.wait(ledger);
            ledger = waited.unwrap_or_else(PoisonError::into_inner);
        }
        ledger.reserve(digest, bytes);
    }

    pub(super) fn is_scanned(&self) -> bool {
        self.deeds.scanned.load(Ordering::Relaxed)
    }

    /// Bytes of disk that the frame takes now; `None` when there is no place for it.
    fn put_reserved(
        &self,
        digest: &Digest,
        frame: &[u8],
        bytes: u64,
    ) -> Result<Option<u64>, CacheError> {
        if !self.make_room(bytes) {
            return Ok(None);
        }
        if let Some(space) = self.lacking() {
            if self.is_scanned() {
                self.note_full();
            }
            return Err(CacheError::NoRoom {
                digest: *digest,
                path: self.root.clone(),
                free: space.free,
                reserve: self.reserve_of(space),
            });
        }
        let path = self.files.path(digest);
        self.write(&path, frame, bytes).map(Some)
    }

    /// Evicts until limit and reserve hold, if that can be done; whether the limit holds. Before the scan is done no more than twice
    /// of what is `added`, and only if nobody else evicts.
    pub(super) fn make_room(&self, added: u64) -> bool {
        let mut wanted = self.wanted(self.missing());
        if wanted.is_nothing() {
            return true;
        }
        if self.is_scanned() {
            self.evict_all();
        } else {
            wanted.bytes = wanted.bytes.min(added.saturating_mul(2));
            wanted.files = 0;
            match self.evictor.try_lock() {
                Ok(evicting) => self.evict(&evicting, wanted),
                Err(TryLockError::Poisoned(evicting)) => {
                    self.evict(&evicting.into_inner(), wanted);
                }
                Err(TryLockError::WouldBlock) => {}
            }
        }
        self.ledger().bytes() <= self.settings.bytes_max
    }

    /// Evicts until limit and reserve hold, or nothing more may go.
    pub(super) fn evict_all(&self) {
        let evicting = lock(&self.evictor);
        // Another thread may have made room meanwhile.
        let wanted = self.wanted(self.missing());
        self.evict(&evicting, wanted);
    }

    /// What the limit, and `missing` bytes of free space, ask for.
    fn wanted(&self, missing: u64) -> Wanted {
        let max = self.settings.bytes_max;
        let ledger = self.ledger();
        let over = ledger.bytes().saturating_sub(max);
        let files = ledger.files_over();
        drop(ledger);
        let slack = |bytes: u64, of: u64| {
            if bytes == 0 {
                0
            } else {
                bytes.saturating_add(of / EVICT_PART)
            }
        };
        let reserve = self.settings.reserve_bytes.unwrap_or(RESERVE_BYTES_MAX);
        Wanted {
            bytes: slack(over, max).max(slack(missing, reserve.min(max))),
            files: if files == 0 {
                0
            } else {
                files + self.settings.files_max / 20
            },
        }
    }

    fn reserve_of(&self, space: Space) -> u64 {
        let usual = || RESERVE_BYTES_MAX.min(space.all / RESERVE_PART);
        self.settings.reserve_bytes.unwrap_or_else(usual)
    }

    fn space(&self) -> Option<Space> {
        // A disk that does not say how full it is says so when it is written to.
        self.disk.space(&self.root).ok()
    }

    /// Free bytes that are missing for the reserve and for what is being written.
    fn missing(&self) -> u64 {
        let writing = self.ledger().writing_bytes();
        self.space().map_or(0, |space| {
            let needed = self.reserve_of(space).saturating_add(writing);
            needed.saturating_sub(space.free)
        })
    }

    /// The space, if it is not enough.
    fn lacking(&self) -> Option<Space> {
        let space = self.space()?;
        let needed = self
            .reserve_of(space)
            .saturating_add(self.ledger().writing_bytes());
        (space.free < needed).then_some(space)
    }

    /// Looks after the reserve when nobody writes: others may have filled the disk. Call it every few seconds.
    pub fn keep_reserve(&self) {
        if self.missing() == 0 {
            let mut health = lock(&self.health);
            if health.state() == DiskState::Full && health.worked() {
                tracing::info!(path = %self.root.display(), "the cache's disk has room again");
            }
            return;
        }
        if !lock(&self.health).may_ask(Instant::now()) {
            return;
        }
        self.evict_all();
        let missing = self.missing();
        if missing > 0 && self.is_scanned() {
            self.note_full();
            if lock(&self.health).alarm(Instant::now()) {
                tracing::warn!(path = %self.root.display(), missing,
                    "others have filled the disk of the cache: the space that is left to them cannot be met, nothing more may be evicted");
            }
        }
    }

    fn note_full(&self) {
        if lock(&self.health).full(Instant::now()) {
            tracing::debug!(path = %self.root.display(), "the cache's disk is full of what is not the cache's");
        }
    }

    /// Unlinks what was used longest ago.
    pub(super) fn evict(&self, _evicting: &Evicting<'_>, wanted: Wanted) {
        if wanted.is_nothing() {
            return;
        }
        let victims = self.ledger().choose(wanted);
        let many = victims.len() >= MEASURE_EVERY;
        for victim in victims {
            let removed = match victim {
                Victim::Segment(digest, _) => self.unlink(&self.files.path(&digest)),
                Victim::Layer(layer, _) => self.unlink_layer(&layer),
            };
            let stays = removed.is_err();
            match (removed, victim) {
                (Ok(true), Victim::Segment(..)) => {
                    self.deeds.evicted.fetch_add(1, Ordering::Relaxed)
                }
                (Ok(true), Victim::Layer(..)) => {
                    self.deeds.evicted_layers.fetch_add(1, Ordering::Relaxed)
                }
                (Ok(false), _) => 0,
                (Err(error), _) => self.note_error(&self.root, &error),
            };
            self.ledger().freed(victim, stays);
            self.freed.notify_all();
        }
        if many {
            self.measure();
        }
    }

    /// Removes a file; whether it was there.
    pub(super) fn unlink(&self, path: &Path) -> io::Result<bool> {
        match self.disk.remove(path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Counts an error of the disk; how many there were before.
    fn note_error(&self, path: &Path, error: &io::Error) -> u64 {
        if lock(&self.health).failed(Instant::now()) {
            tracing::error!(path = %path.display(), %error, "the cache's disk is failing; going on without it for a while");
        }
        self.deeds.errors.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes a file so that its name shows all of it or nothing; bytes of disk it takes. A full disk is tried once more after
    /// evicting as much.
    pub(super) fn write(
        &self,
        path: &Path,
        contents: &[u8],
        bytes: u64,
    ) -> Result<u64, CacheError> {
        let mut written = self.write_once(path, contents);
        if written.as_ref().is_err_and(is_full) {
            let evicting = lock(&self.evictor);
            let wanted = Wanted {
                bytes: bytes.saturating_add(self.settings.bytes_max / EVICT_PART),
                files: 0,
            };
            self.evict(&evicting, wanted);
            drop(evicting);
            written = self.write_once(path, contents);
        }
        match written {
            Ok(bytes) => {
                if lock(&self.health).worked() {
                    tracing::info!(path = %self.root.display(), "the cache's disk can be written again");
                }
                Ok(bytes)
            }
            Err(source) => {
                if is_full(&source) {
                    self.note_full();
                } else {
                    self.note_error(path, &source);
                }
                Err(CacheError::Write {
                    path: path.to_owned(),
                    source,
                })
            }
        }
    }

    fn write_once(&self, path: &Path, contents: &[u8]) -> io::Result<u64> {
        let tmp = self.tmp();
        let written = self.disk.create(&tmp, contents).and_then(|bytes| {
            self.rename(&tmp, path)?;
            Ok(bytes)
        });
        if written.is_err()
            && let Err(error) = self.unlink(&tmp)
        {
            tracing::debug!(path = %tmp.display(), %error, "a temporary file stays until the next start");
        }
        written
    }

    pub(super) fn rename(&self, tmp: &Path, path: &Path) -> io::Result<()> {
        match self.disk.rename(tmp, path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if let Some(folder) = path.parent() {
                    self.disk.create_folder(folder)?;
                }
                self.disk.rename(tmp, path)?;
                self.measure();
                Ok(())
            }
            renamed => renamed,
        }
    }
}
