//! Requests and replies of layerd's socket. Field names are a contract: scripts read them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where layerd listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/dsec/layerd.sock";

/// `POST /v1/mounts`: compose layers and mount them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    /// Layers, lowest first: `axis/name:version` or digests.
    pub refs: Vec<String>,
    /// An existing directory, as an absolute path.
    pub mountpoint: PathBuf,
    /// Whether writes are allowed; they go to a fresh upper directory.
    #[serde(default)]
    pub rw: bool,
    /// A trace (the text of a trace file) that says what will be read first; without it, the one that the layer's tag names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// Fetch nothing before it is read, whatever a trace says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_trace: bool,
}

/// `POST /v1/trace` (with an [`UmountRequest`]): what was read of a composition since its layers are served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedTrace {
    /// The text of a trace file.
    pub trace: String,
    /// More was read than is recorded: the trace holds the beginning.
    pub truncated: bool,
}

/// `DELETE /v1/mounts`: take a composition away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UmountRequest {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
}

/// Whether a composition can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountState {
    /// It is served.
    Alive,
    /// Its data plane died: reads give EIO. Mount it again at the same place, or unmount it.
    Dead,
}

/// One mounted composition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Its id, unique in this cache.
    pub id: String,
    /// Layers as the user named them, lowest first.
    pub refs: Vec<String>,
    /// Digests of the layers, lowest first.
    pub layers: Vec<String>,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Whether writes are allowed.
    pub rw: bool,
    /// Where writes land.
    pub upper: Option<PathBuf>,
    /// Where each layer is mounted by itself, lowest first. They stay as long as the composition does, so that others can build on
    /// them (`sandboxd` makes overlays of its own, with mapped ids).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lowers: Vec<PathBuf>,
    /// Whether it is served.
    pub state: MountState,
}

/// `GET /v1/mounts`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounts {
    /// All compositions, by mountpoint.
    pub mounts: Vec<Mount>,
}

/// What a layer, a composition or the whole daemon has done. Counted by the data plane, so a restart of the control
/// process loses nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Requests to origins: segment ranges, and in `total` also tags, manifests, placements and metadata. Failed ones and
    /// retries included.
    pub remote_requests: u64,
    /// Body bytes of accepted answers to those.
    pub remote_bytes: u64,
    /// Bytes of file data (not metadata) handed to the kernel.
    pub served_bytes: u64,
    /// Pieces of reads (one read touches one or two segments) that came from memory or from the cache on disk.
    pub cache_hits: u64,
    /// Pieces of reads that had to wait for an origin.
    pub cache_misses: u64,
    /// Segments whose bytes did not have the right digest, wherever they came from. None of those bytes was served.
    pub verify_failures: u64,
    /// Plain bytes of the segments that came from an origin.
    pub fetched_plain_bytes: u64,
    /// Distinct 4 KiB blocks of file data that the kernel asked for, in bytes (its read-ahead within files included).
    pub needed_bytes: u64,
    /// Segments that were loaded before anybody read them.
    pub prefetched_segments: u64,
    /// Segments that were fetched because a trace foresaw them.
    pub traced_segments: u64,
    /// Their bytes as fetched.
    pub traced_bytes: u64,
    /// Of those segments, the ones that nobody has read yet.
    pub traced_unused_segments: u64,
    /// Requests that followed a failed one.
    pub retries: u64,
    /// Reads that reached the FUSE server.
    pub fuse_reads: u64,
    /// Bytes of metadata handed to the kernel: once when a layer is mounted, and again what its page cache has dropped.
    pub meta_bytes: u64,
    /// Reads that ended in EIO.
    pub failed_reads: u64,
    /// Bytes written to the cache on disk.
    pub cache_write_bytes: u64,
    /// Segments that could not be written to the cache and were served all the same.
    pub cache_write_failures: u64,
}

impl Counters {
    /// Adds `other` to each counter.
    pub fn add(&mut self, other: &Self) {
        let Self {
            remote_requests,
            remote_bytes,
            served_bytes,
            cache_hits,
            cache_misses,
            verify_failures,
            fetched_plain_bytes,
            needed_bytes,
            prefetched_segments,
            traced_segments,
            traced_bytes,
            traced_unused_segments,
            retries,
            fuse_reads,
            meta_bytes,
            failed_reads,
            cache_write_bytes,
            cache_write_failures,
        } = other;
        self.remote_requests += remote_requests;
        self.remote_bytes += remote_bytes;
        self.served_bytes += served_bytes;
        self.cache_hits += cache_hits;
        self.cache_misses += cache_misses;
        self.verify_failures += verify_failures;
        self.fetched_plain_bytes += fetched_plain_bytes;
        self.needed_bytes += needed_bytes;
        self.prefetched_segments += prefetched_segments;
        self.traced_segments += traced_segments;
        self.traced_bytes += traced_bytes;
        self.traced_unused_segments += traced_unused_segments;
        self.retries += retries;
        self.fuse_reads += fuse_reads;
        self.meta_bytes += meta_bytes;
        self.failed_reads += failed_reads;
        self.cache_write_bytes += cache_write_bytes;
        self.cache_write_failures += cache_write_failures;
    }
}

/// The counters of one composition: the sum over its layers. A layer that several compositions share counts in each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountStats {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Its id.
    pub id: String,
    /// The sums.
    #[serde(flatten)]
    pub counters: Counters,
}

/// State of the cache on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CacheStats {
    /// Bytes of disk that the cache takes: segments, descriptions of layers, folders, files being written.
    pub bytes_used: u64,
    /// The limit.
    pub bytes_max: u64,
    /// Segments evicted since the control process started.
    pub evicted: u64,
    /// Segments in the cache.
    #[serde(default)]
    pub segments: u64,
    /// Of the bytes, descriptions of layers.
    #[serde(default)]
    pub layer_bytes: u64,
    /// Segments that were served and not kept, since the control process started.
    #[serde(default)]
    pub not_kept: u64,
    /// Errors of the cache's disk since then.
    #[serde(default)]
    pub disk_errors: u64,
    /// Whether what earlier runs left is counted; the limit holds from then on.
    #[serde(default)]
    pub counted: bool,
    /// Whether the disk is left alone for a while, because it is full or failing.
    #[serde(default)]
    pub disk: CacheDisk,
}

/// How the cache's disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CacheDisk {
    /// It is used.
    #[default]
    Fine,
    /// Others have filled it; segments are served without being kept.
    Full,
    /// It answers with errors; segments are served without being kept.
    Failing,
}

/// `GET /v1/stats`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Per composition, by mountpoint.
    pub mounts: Vec<MountStats>,
    /// Each layer once (also those no longer mounted), and what names and metadata cost.
    pub total: Counters,
    /// The cache.
    pub cache: CacheStats,
    /// Process id of the data plane, while it lives.
    pub data_plane_pid: Option<u32>,
    /// Process id of the control process.
    pub control_pid: u32,
    /// How layers reach the kernel: `fuse` or `ublk`.
    #[serde(default)]
    pub driver: String,
    /// Why it is that.
    #[serde(default)]
    pub driver_reason: String,
}

/// What the caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request itself is wrong.
    Invalid,
    /// No such layer, tag or mount.
    NotFound,
    /// Something is already there.
    Conflict,
    /// An origin or the data plane cannot be reached; try again later.
    Unavailable,
    /// Bytes are damaged.
    Corrupt,
    /// The caller may not do this.
    Forbidden,
    /// The kernel or the disk refused.
    Internal,
}

/// The body of every error reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// What to do about it.
    pub kind: ErrorKind,
    /// What happened, for people.
    pub message: String,
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_have_the_field_names_that_scripts_read() {
        let stats = Stats {
            mounts: vec![MountStats {
                mountpoint: "/mnt".into(),
                id: "a".to_owned(),
                counters: Counters::default(),
            }],
            total: Counters::default(),
            cache: CacheStats::default(),
            data_plane_pid: None,
            control_pid: 1,
            driver: "fuse".to_owned(),
            driver_reason: "asked for".to_owned(),
        };
        let json = serde_json::to_value(&stats).unwrap();
        for field in [
            "remote_requests",
            "remote_bytes",
            "served_bytes",
            "cache_hits",
            "cache_misses",
            "verify_failures",
        ] {
            assert_eq!(json["total"][field], 0, "{field}");
            assert_eq!(json["mounts"][0][field], 0, "{field}");
        }
        assert_eq!(json["mounts"][0]["mountpoint"], "/mnt");
    }

    #[test]
    fn adding_counters_adds_every_field() {
        let ones = r#"{"remote_requests":1,"remote_bytes":1,"served_bytes":1,"cache_hits":1,"cache_misses":1,
            "verify_failures":1,"fetched_plain_bytes":1,"needed_bytes":1,"prefetched_segments":1,"traced_segments":1,"traced_bytes":1,"traced_unused_segments":1,"retries":1,
            "fuse_reads":1,"meta_bytes":1,"failed_reads":1,"cache_write_bytes":1,"cache_write_failures":1}"#;
        let ones: Counters = serde_json::from_str(ones).unwrap();
        let mut sum = ones;
        sum.add(&ones);
        let json = serde_json::to_value(sum).unwrap();
        let fields = json.as_object().unwrap();
        assert_eq!(fields.len(), 18);
        assert!(fields.values().all(|v| *v == 2), "{json}");
    }
}
