//! What is fetched before anybody asks: what a trace foresees.
//!
//! A layer that `dsec optimize` made says in its manifest which segments come first; for others, the tag may name a published
//! trace, or the user gives one with the mount. Fetching begins as soon as the layer is described, while the mount is still
//! being made: not sooner, for it would share the link with the metadata that the mount waits for. It is never waited for, and stops by itself: when the limit of the cache would have something evicted for
//! it, when an origin fails, and when the last composition with the layer goes.

use std::sync::Arc;

use imgstore::format::trace::{Trace, segments_of};
use imgstore::ids::{Digest, to_u64};
use imgstore::store::layer::Layer;
use layerd_client::api::MountRequest;

use super::feed::Feed;
use super::layers::LayerStore;
use super::mounts::MountsError;

/// What a mount wants.
#[derive(Debug, Clone)]
pub(crate) enum Foresight {
    /// Nothing.
    Off,
    /// What is published with the layers.
    Published,
    /// This.
    Given(Arc<Trace>),
}

impl Foresight {
    /// What `request` asks for. `enabled`: whether layerd fetches ahead at all.
    ///
    /// # Errors
    /// When it has a trace that is none.
    pub(crate) fn of(request: &MountRequest, enabled: bool) -> Result<Self, MountsError> {
        let given = request
            .trace
            .as_ref()
            .map(|text| Trace::parse(text.as_bytes()));
        let given = given
            .transpose()
            .map_err(|e| MountsError::Request(format!("the trace cannot be used: {e}")))?;
        Ok(match given {
            _ if request.no_trace || !enabled => Self::Off,
            Some(trace) => Self::Given(Arc::new(trace)),
            None => Self::Published,
        })
    }

    pub(crate) const fn is_on(&self) -> bool {
        !matches!(self, Self::Off)
    }

    /// Begins to fetch what will be read of `layer`. `published`: the trace that its tag names.
    pub(crate) fn begin(
        &self,
        layer: &Arc<Layer>,
        published: Option<Digest>,
        layers: &Arc<LayerStore>,
        feed: &Feed,
    ) {
        let hot = layer.manifest.hot_segments();
        match self {
            Self::Off => {}
            Self::Given(trace) if trace.layers.contains(&layer.digest) => {
                follow(layer, trace, feed, layers.pace())
            }
            Self::Given(trace) if hot == 0 => {
                tracing::warn!(layer = %layer.digest, of = ?trace.layers, "the trace has nothing of this layer; it is mounted without");
            }
            _ if hot > 0 => feed.prefetch(layer, 0..hot, layers.pace()),
            _ => {
                if let Some(digest) = published {
                    fetch_and_follow(layer, digest, layers, feed);
                }
            }
        }
    }
}

fn follow(layer: &Arc<Layer>, trace: &Trace, feed: &Feed, pace: Option<u64>) {
    match segments_of(&layer.manifest, &trace.of_layer(&layer.digest)) {
        Ok(segments) => feed.prefetch(layer, segments, pace),
        Err(error) => {
            tracing::warn!(layer = %layer.digest, %error, "the trace is ignored");
        }
    }
}

/// On a thread of its own: the mount does not wait for the trace.
fn fetch_and_follow(layer: &Arc<Layer>, digest: Digest, layers: &Arc<LayerStore>, feed: &Feed) {
    let (layer, layers, feed) = (Arc::clone(layer), Arc::clone(layers), feed.clone());
    let run = move || match layers.trace(&digest) {
        Ok(trace) if trace.layers.contains(&layer.digest) => {
            follow(&layer, &trace, &feed, layers.pace())
        }
        Ok(trace) => {
            tracing::warn!(layer = %layer.digest, trace = %digest, of = ?trace.layers, "the tag's trace is of other layers and is ignored");
        }
        Err(error) => {
            tracing::warn!(layer = %layer.digest, trace = %digest, %error, "the tag's trace cannot be read; mounted without");
        }
    };
    let spawned = std::thread::Builder::new()
        .name("trace".to_owned())
        .spawn(run);
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread to fetch a trace with; mounted without");
    }
}

/// The first touches of several layers as one trace, in the order of time.
pub(crate) fn merge(of_layers: Vec<(Digest, crate::protocol::Touches)>) -> (Trace, bool) {
    let mut all = Vec::new();
    let mut truncated = false;
    for (layer, touches) in of_layers {
        truncated |= touches.full;
        all.extend(touches.touches.into_iter().map(|touch| (touch, layer)));
    }
    all.sort_by_key(|(touch, _)| *touch);
    truncated |= to_u64(all.len()) > to_u64(imgstore::format::trace::RUNS_MAX);
    let touches = all.into_iter().map(|(touch, layer)| {
        let (first, count) = (touch.first, touch.count);
        (layer, imgstore::format::trace::Blocks { first, count })
    });
    (Trace::new(touches), truncated)
}
