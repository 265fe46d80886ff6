//! What the control process may ask of the data plane.

use std::io::BufReader;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use imgstore::ids::{Digest, to_u64};
use imgstore::image::BlockImage;
use layerd_client::api::ErrorKind;

use super::End;
use super::door::{Door, DoorError};
use super::image::LayerImage;
use super::layer::{LayerState, Layers};
use super::link::Link;
use super::loader::Loader;
use super::pages::PageWindow;
use crate::driver::Driver;
use crate::kill::step;
use crate::paths::Paths;
use crate::protocol::{
    Failure, PlaneStats, ToControl, ToData, VERSION, features as features_of_this_build,
    read_message,
};

/// Most metadata put into the page cache when a layer is mounted. More is read when it is needed, from disk.
const PRELOAD_BYTES_MAX: u64 = 64 << 20;

/// Everything a connection needs.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) paths: Paths,
    pub(crate) door: Door,
    pub(crate) layers: Layers,
    pub(crate) loader: Loader,
    pub(crate) link: Arc<Link>,
    pub(crate) pages: Option<Arc<PageWindow>>,
    /// Says that the process is to end.
    pub(crate) end: mpsc::Sender<End>,
}

impl Server {
    /// Serves one connection after another, for ever. The newest replaces the one before.
    pub(crate) fn accept(self: &Arc<Self>, listener: &UnixListener) {
        for stream in listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::error!(%error, "cannot accept the control process's connection");
                    continue;
                }
            };
            let server = Arc::clone(self);
            let spawned = std::thread::Builder::new()
                .name("link".to_owned())
                .spawn(move || server.serve(stream));
            if let Err(error) = spawned {
                tracing::error!(%error, "cannot serve the control process's connection");
            }
        }
    }

    fn serve(self: &Arc<Self>, stream: UnixStream) {
        let generation = match self.link.open(&stream) {
            Ok(generation) => generation,
            Err(error) => {
                tracing::error!(%error, "cannot use the control process's connection");
                return;
            }
        };
        let mut reader = BufReader::with_capacity(32 << 10, stream);
        loop {
            match read_message(&mut reader) {
                Ok(Some((message, bytes))) => self.handle(message, bytes),
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "the control process's connection broke");
                    break;
                }
            }
        }
        self.link.close(generation);
        tracing::info!("the control process is gone; cached segments are served on");
    }

    fn handle(self: &Arc<Self>, message: ToData, bytes: Vec<u8>) {
        match message {
            ToData::Hello { version, features } => self.welcome(version, &features),
            ToData::AddImage {
                id,
                layer,
                uncounted,
                ahead,
            } => self.apart(id, move |server| {
                server.add(layer, !uncounted, ahead).map(Some)
            }),
            ToData::RemoveImage { id, layer } => {
                self.apart(id, move |server| server.remove(layer).map(|()| None));
            }
            ToData::Frame {
                digest,
                from,
                cost,
                traced,
            } => {
                if let Some(cost) = cost {
                    self.layers.count(Some(&cost.layer), &cost.counters());
                }
                if let Some(traced) = traced {
                    self.layers.note_traced(traced, to_u64(bytes.len()));
                }
                self.loader.frame(digest, bytes, from, traced.is_some());
            }
            ToData::NoFrame {
                digests,
                reason,
                foreseen,
            } => self.loader.no_frame(&digests, &reason, foreseen),
            ToData::Count { layer, counters } => self.layers.count(layer.as_ref(), &counters),
            ToData::Stats { id } => {
                self.loader.report_used();
                let (layers, total) = self.layers.stats();
                self.link.send(&ToControl::Done {
                    id,
                    failure: None,
                    stats: Some(Box::new(PlaneStats {
                        layers,
                        total,
                        now: Some(self.loader.now()),
                    })),
                    touches: None,
                    source: None,
                });
            }
            ToData::Trace { id, layer } => {
                let layer = self.layers.get(&layer);
                self.link.send(&ToControl::Done {
                    id,
                    failure: None,
                    stats: None,
                    touches: layer.map(|layer| Box::new(layer.touches())),
                    source: None,
                });
            }
            ToData::Unknown => {
                tracing::warn!("the control process said something that only later builds know");
            }
            ToData::Exit { id } => {
                self.done(id, Ok(None));
                if self.end.send(End::Asked).is_err() {
                    tracing::warn!("the data plane is ending already");
                }
            }
        }
    }

    fn welcome(&self, version: u32, features: &[String]) {
        tracing::debug!(version, ?features, "a control process");
        if version != VERSION {
            tracing::error!(
                expected = VERSION,
                found = version,
                "the control process speaks another version; it will not adopt this data plane"
            );
        }
        self.link.send(&ToControl::Welcome {
            version: VERSION,
            pid: std::process::id(),
            layers: self.offered(),
            features: features_of_this_build(),
            driver: self.door.driver(),
        });
        if version == VERSION {
            self.loader.ask_again();
        }
    }

    fn done(&self, id: u64, result: Result<Option<PathBuf>, Failure>) {
        step("answering");
        let (source, failure) = match result {
            Ok(source) => (source, None),
            Err(failure) => (None, Some(failure)),
        };
        self.link.send(&ToControl::Done {
            id,
            failure,
            stats: None,
            touches: None,
            source,
        });
    }

    /// Does something that may take a while away from the connection, on which frames arrive.
    fn apart(
        self: &Arc<Self>,
        id: u64,
        what: impl FnOnce(&Self) -> Result<Option<PathBuf>, Failure> + Send + 'static,
    ) {
        let server = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("image".to_owned())
            .spawn(move || server.done(id, what(&server)));
        if let Err(error) = spawned {
            self.done(
                id,
                Err(Failure {
                    kind: ErrorKind::Internal,
                    message: format!("the data plane cannot start a thread: {error}"),
                }),
            );
        }
    }

    /// The layers that the kernel can read.
    fn offered(&self) -> Vec<Digest> {
        let mut layers = self.layers.digests();
        layers.retain(|layer| self.door.source(layer).is_some());
        layers
    }

    /// Opens a layer that an earlier data plane served. Its readers are there already.
    pub(crate) fn reopen(&self, layer: Digest) -> Result<Arc<dyn BlockImage>, String> {
        let state = LayerState::open(&self.paths.layer(&layer), layer, false);
        let state = Arc::new(state.map_err(|error| error.to_string())?);
        self.layers.insert(Arc::clone(&state));
        Ok(self.image(&state))
    }

    fn image(&self, state: &Arc<LayerState>) -> Arc<dyn BlockImage> {
        Arc::new(LayerImage {
            layer: Arc::clone(state),
            loader: self.loader.clone(),
            pages: self.pages.clone(),
        })
    }

    fn add(&self, layer: Digest, counted: bool, ahead: bool) -> Result<PathBuf, Failure> {
        if self.layers.get(&layer).is_some()
            && let Some(source) = self.door.source(&layer)
        {
            return Ok(source);
        }
        let mut state =
            LayerState::open(&self.paths.layer(&layer), layer, ahead).map_err(|e| Failure {
                kind: if e.is_damage() {
                    ErrorKind::Corrupt
                } else {
                    ErrorKind::Internal
                },
                message: e.to_string(),
            })?;
        state.counted = counted;
        let state = Arc::new(state);
        let preload = state.meta.len().min(PRELOAD_BYTES_MAX);
        step("an image is opened");
        let image = self.image(&state);
        let source = self
            .door
            .add(layer, image, preload)
            .map_err(|e| internal(&e))?;
        step("an image has a name");
        if self.layers.get(&layer).is_none() {
            self.layers.insert(state);
        }
        step("an image is served");
        Ok(source)
    }

    fn remove(&self, layer: Digest) -> Result<(), Failure> {
        let served = self.layers.remove(&layer).is_some();
        if !served && self.door.driver() == Driver::Fuse {
            return Ok(());
        }
        step("an image is forgotten");
        let removed = self.door.remove(&layer);
        step("an image is gone");
        removed.map_err(|e| internal(&e))
    }

    /// Ends the connection, which tells the control process that everything is done.
    pub(crate) fn say_goodbye(&self) {
        self.link.close_current();
    }
}

fn internal(error: &DoorError) -> Failure {
    Failure {
        kind: ErrorKind::Internal,
        message: error.to_string(),
    }
}
