//! Drops pages from the page cache of the FUSE files when the data plane says that they are no longer useful
//! (`plane/pages` tells why it does not do that itself).
//!
//! `posix_fadvise(DONTNEED)` passes over pages that somebody is reading and never waits for them. It needs the file to be
//! open: each is opened once, on this module's own thread, and closed when its layer goes.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::sync::mpsc::{Receiver, Sender, channel};

use imgstore::ids::Digest;
use rustix::fs::Advice;

use crate::paths::Paths;

#[derive(Debug)]
enum Order {
    Drop {
        layer: Digest,
        start: u64,
        end: u64,
    },
    /// Close the file of this layer, or (none) all; then drop the sender.
    Close(Option<Digest>, Sender<()>),
}

/// See the head of this file.
#[derive(Debug, Clone)]
pub(crate) struct PageDropper {
    orders: Sender<Order>,
}

impl PageDropper {
    /// Starts the thread.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(paths: Paths) -> io::Result<Self> {
        let (orders, receive) = channel();
        std::thread::Builder::new()
            .name("drop-pages".to_owned())
            .spawn(move || work(&paths, &receive))?;
        Ok(Self { orders })
    }

    fn order(&self, order: Order) {
        if self.orders.send(order).is_err() {
            tracing::error!("nobody drops pages any more");
        }
    }

    /// Drops pages, some time soon.
    pub(crate) fn drop_pages(&self, layer: Digest, start: u64, end: u64) {
        self.order(Order::Drop { layer, start, end });
    }

    /// Closes the file of a layer, or all files, and waits until that is done.
    pub(crate) fn close(&self, layer: Option<Digest>) {
        let (done, wait) = channel();
        self.order(Order::Close(layer, done));
        // Ends when the other end is dropped; nothing is ever sent.
        if wait.recv().is_ok() {
            tracing::error!("an unexpected answer");
        }
    }
}

fn work(paths: &Paths, orders: &Receiver<Order>) {
    let mut files: HashMap<Digest, File> = HashMap::new();
    for order in orders {
        match order {
            Order::Drop { layer, start, end } => {
                if let Err(error) = drop_range(paths, &mut files, layer, start..end) {
                    tracing::debug!(%layer, %error, "pages stay in the page cache");
                }
            }
            Order::Close(Some(layer), _done) => drop(files.remove(&layer)),
            Order::Close(None, _done) => files.clear(),
        }
    }
}

fn drop_range(
    paths: &Paths,
    files: &mut HashMap<Digest, File>,
    layer: Digest,
    range: std::ops::Range<u64>,
) -> io::Result<()> {
    let Some(len) = NonZeroU64::new(range.end.saturating_sub(range.start)) else {
        return Ok(());
    };
    let file = match files.entry(layer) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => {
            entry.insert(File::open(paths.fuse().join(layer.to_hex()))?)
        }
    };
    rustix::fs::fadvise(&*file, range.start, Some(len), Advice::DontNeed)?;
    Ok(())
}
