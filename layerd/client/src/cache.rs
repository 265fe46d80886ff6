//! Requests and replies about what is in the cache. Field names are a contract: scripts read them.

use serde::{Deserialize, Serialize};

use crate::api::CacheStats;

/// `POST` and `DELETE /v1/cache/pins`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinRequest {
    /// `axis/name:version` or a digest.
    #[serde(rename = "ref")]
    pub reference: String,
}

/// Answer to a [`PinRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// The layer that the reference named.
    pub layer: String,
    /// Whether it is pinned now.
    pub pinned: bool,
}

/// One layer in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedLayer {
    /// Its digest.
    pub layer: String,
    /// What it was called when it was pinned or mounted, if that is known.
    pub refs: Vec<String>,
    /// Bytes that its description (manifest, placement, metadata) takes.
    pub layer_bytes: u64,
    /// Bytes that its cached segments take. Segments that several layers share count in each.
    pub segment_bytes: u64,
    /// Segments that are cached.
    pub segments_cached: u64,
    /// All its segments.
    pub segments: u64,
    /// Whether it is mounted: its description stays.
    pub mounted: bool,
    /// Whether it is pinned: its description and its cached segments stay.
    pub pinned: bool,
}

/// `GET /v1/cache`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheContents {
    /// The sums.
    #[serde(flatten)]
    pub stats: CacheStats,
    /// Layers that are described in the cache or pinned, the largest first.
    pub layers: Vec<CachedLayer>,
}
