//! What is in the cache, pins, and the thread that looks after its limits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use imgstore::ids::{Digest, LayerRef, round_up_to_block, to_u64};
use imgstore::store::cache::health::DiskState;
use imgstore::store::cache::{CacheError, SegmentCache};
use imgstore::store::layer::Layer;
use layerd_client::api::{ApiError, CacheDisk, CacheStats, ErrorKind};
use layerd_client::cache::{CacheContents, CachedLayer, PinRequest, Pinned};

use super::ahead::Foresight;
use super::mounts::MountsError;
use super::service::Service;

/// The free space is looked at this often.
const KEEP_EVERY: Duration = Duration::from_secs(1);
/// A cache that could not be counted is tried again after this.
const SCAN_AGAIN: Duration = Duration::from_secs(60);

/// Counts the cache, then looks after the space that is left to others. Does not return.
pub(crate) fn keep(cache: &SegmentCache) {
    let mut scan_at = Some(Instant::now());
    loop {
        if scan_at.is_some_and(|at| at <= Instant::now()) {
            let started = Instant::now();
            match cache.scan() {
                Ok(()) => {
                    let usage = cache.usage();
                    tracing::info!(
                        segments = usage.segments,
                        layers = usage.layers,
                        bytes = usage.bytes,
                        seconds = started.elapsed().as_secs_f64(),
                        "counted the cache"
                    );
                    scan_at = None;
                }
                Err(error) => {
                    tracing::error!(%error, "cannot count the cache; trying again, it is bounded by what is known meanwhile");
                    scan_at = Some(Instant::now() + SCAN_AGAIN);
                }
            }
        }
        cache.keep_reserve();
        std::thread::sleep(KEEP_EVERY);
    }
}

/// The sums.
pub(crate) fn stats(cache: &SegmentCache) -> CacheStats {
    let (usage, deeds) = (cache.usage(), cache.deeds());
    CacheStats {
        bytes_used: usage.bytes,
        bytes_max: cache.bytes_max(),
        evicted: deeds.evicted,
        segments: usage.segments,
        layer_bytes: usage.layer_bytes,
        not_kept: deeds.not_kept,
        disk_errors: deeds.errors,
        counted: deeds.scanned,
        disk: match deeds.disk {
            DiskState::Full => CacheDisk::Full,
            DiskState::Failing => CacheDisk::Failing,
            _ => CacheDisk::Fine,
        },
    }
}

/// Everything that is described or pinned, with what is cached of it.
pub(crate) fn contents(service: &Service) -> CacheContents {
    let cache = &service.cache;
    let mut refs: BTreeMap<Digest, BTreeSet<String>> = BTreeMap::new();
    for mount in service.mounts() {
        let parsed = mount.layers.iter().map(|layer| layer.parse().ok());
        for (layer, reference) in parsed.zip(&mount.refs) {
            if let Some(layer) = layer {
                refs.entry(layer).or_default().insert(reference.clone());
            }
        }
    }
    let pins = cache.pins();
    let mut segments: BTreeMap<Digest, Vec<Digest>> = BTreeMap::new();
    for pin in &pins {
        refs.entry(pin.layer)
            .or_default()
            .insert(pin.reference.clone());
        segments.insert(pin.layer, pin.segments.iter().map(|(d, _)| *d).collect());
    }
    let described = cache.described_layers();
    for layer in &described {
        let found = || service.mounts.layers.segments(&layer.layer);
        segments
            .entry(layer.layer)
            .or_insert_with(|| found().unwrap_or_default());
    }
    let mut layers: Vec<CachedLayer> = segments
        .into_iter()
        .map(|(layer, segments)| {
            let of_layer = described.iter().find(|d| d.layer == layer);
            let cached: Vec<u64> = segments
                .iter()
                .filter_map(|digest| cache.segment_bytes(digest))
                .collect();
            CachedLayer {
                layer: layer.to_hex(),
                refs: refs
                    .remove(&layer)
                    .unwrap_or_default()
                    .into_iter()
                    .collect(),
                layer_bytes: of_layer.map_or(0, |d| d.bytes),
                segment_bytes: cached.iter().sum(),
                segments_cached: to_u64(cached.len()),
                segments: to_u64(segments.len()),
                mounted: of_layer.is_some_and(|d| d.held),
                pinned: pins.iter().any(|pin| pin.layer == layer),
            }
        })
        .collect();
    layers.sort_by_key(|l| std::cmp::Reverse(l.layer_bytes + l.segment_bytes));
    CacheContents {
        stats: stats(cache),
        layers,
    }
}

fn refused(error: &CacheError) -> ApiError {
    let kind = match error {
        CacheError::PinTooLarge { .. } | CacheError::TooManyPins { .. } => ErrorKind::Conflict,
        _ => ErrorKind::Internal,
    };
    ApiError {
        kind,
        message: error.to_string(),
    }
}

/// The segments of a layer with the bytes of disk that each takes when it is cached.
fn segments(layer: &Layer) -> Vec<(Digest, u64)> {
    let spots = layer.placement.segments.iter();
    let stored = spots.map(|spot| round_up_to_block(u64::from(spot.2)));
    let digests = layer.manifest.segments.iter().map(|s| s.digest());
    digests.zip(stored).collect()
}

/// Pins a layer; its description is fetched, its segments come when they are read.
///
/// # Errors
/// In words for the caller.
pub(crate) fn pin(service: &Service, request: &PinRequest) -> Result<Pinned, ApiError> {
    let described = service
        .mounts
        .describe(std::slice::from_ref(&request.reference), &Foresight::Off)?;
    let Some((layer, _hold)) = described.first() else {
        return Err(MountsError::Request("one layer is needed".to_owned()).into());
    };
    let pinned = service
        .cache
        .pin(&layer.digest, &request.reference, segments(layer));
    service.mounts.unload_unused(&layer.digest);
    pinned.map_err(|error| refused(&error))?;
    tracing::info!(layer = %layer.digest, reference = request.reference, "pinned");
    Ok(Pinned {
        layer: layer.digest.to_hex(),
        pinned: true,
    })
}

/// Takes a pin away. A reference that was pinned needs no origin; any other is resolved.
///
/// # Errors
/// In words for the caller.
pub(crate) fn unpin(service: &Service, request: &PinRequest) -> Result<Pinned, ApiError> {
    let reference: LayerRef = request.reference.parse().map_err(MountsError::from)?;
    let pins = service.cache.pins();
    let by_name = pins.iter().find(|pin| pin.reference == request.reference);
    let layer = match (by_name, &reference) {
        (Some(pin), _) => pin.layer,
        (None, LayerRef::Layer(digest)) => *digest,
        (None, _) => {
            service
                .mounts
                .layers
                .find(&reference)
                .map_err(MountsError::from)?
                .layer
        }
    };
    let was = service.cache.unpin(&layer);
    if !was.map_err(|error| refused(&error))? {
        return Err(ApiError {
            kind: ErrorKind::NotFound,
            message: format!(
                "`{}` is not pinned; `dsec cache ls` lists what is",
                request.reference
            ),
        });
    }
    tracing::info!(%layer, "unpinned");
    Ok(Pinned {
        layer: layer.to_hex(),
        pinned: false,
    })
}
