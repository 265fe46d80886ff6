//! Reads a whole layer in user space with `erofs-rs`, an EROFS reader that shares no code with our writer.
//!
//! It sees metadata in memory, and one device a segment, read by whatever the caller reads them with. Used to compare a fresh
//! build with its source, to verify, and to export. Mounts do not come through here: there the kernel is the reader.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use erofs_rs::r#async::EroFS;
use erofs_rs::backend::AsyncImage;
use erofs_rs::types::Inode as ErofsInode;
use rustix::fs::FileType;

use crate::format::manifest::Manifest;
use crate::ids::to_u64;
use crate::tree::{Content, Inode, InodeId, Kind, Meta, Mtime, Place, ROOT, Tree};

/// Why a layer could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReaderError {
    /// The metadata image is damaged.
    #[error("metadata image: {0}")]
    Erofs(#[from] erofs_rs::Error),
    /// The image holds something that our writer never writes.
    #[error("`{path}` in the metadata image: {what}")]
    Odd {
        /// Path in the layer.
        path: String,
        /// What is odd.
        what: &'static str,
    },
}

/// Gives the verified plain bytes of segment `n`.
pub type ReadSegment<'a> = dyn Fn(usize) -> Result<Vec<u8>, String> + Send + Sync + 'a;

/// Segments kept in memory by one reader; neighbours are read together.
const SEGMENTS_KEPT: usize = 4;

/// The bytes of a layer: metadata, and the segments kept in memory.
struct Bytes<'a> {
    meta: &'a [u8],
    read_segment: &'a ReadSegment<'a>,
    kept: Mutex<Vec<(usize, Arc<Vec<u8>>)>>,
}

/// One device as `erofs-rs` wants it.
enum Device<'a> {
    /// The metadata image.
    Meta(Arc<Bytes<'a>>),
    /// A segment.
    Segment(Arc<Bytes<'a>>, usize),
}

impl Bytes<'_> {
    fn segment(&self, index: usize) -> Result<Arc<Vec<u8>>, erofs_rs::Error> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|(i, _)| *i == index) {
            let hit = kept.remove(at);
            let bytes = Arc::clone(&hit.1);
            kept.push(hit);
            return Ok(bytes);
        }
        drop(kept);
        let bytes = (self.read_segment)(index).map(Arc::new).map_err(|e| {
            erofs_rs::Error::Io(std::io::Error::other(format!("segment {index}: {e}")))
        })?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= SEGMENTS_KEPT {
            kept.remove(0);
        }
        kept.push((index, Arc::clone(&bytes)));
        Ok(bytes)
    }
}

fn fill(source: &[u8], buf: &mut [u8], offset: u64) -> Result<(), erofs_rs::Error> {
    let start = usize::try_from(offset).ok();
    let range = start.and_then(|start| Some(start..start.checked_add(buf.len())?));
    let bytes = range.and_then(|range| source.get(range)).ok_or_else(|| {
        erofs_rs::Error::OutOfBounds(format!(
            "{} bytes at {offset} of {}",
            buf.len(),
            source.len()
        ))
    })?;
    buf.copy_from_slice(bytes);
    Ok(())
}

impl AsyncImage for Device<'_> {
    async fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), erofs_rs::Error> {
        match self {
            Self::Meta(bytes) => fill(bytes.meta, buf, offset),
            Self::Segment(bytes, index) => fill(&bytes.segment(*index)?, buf, offset),
        }
    }
}

/// Runs a future that never waits: our image answers at once.
fn run<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
}

/// A tree read from a layer, with the reader's handle of each regular file.
#[derive(Debug)]
pub struct LayerTree {
    /// The tree; contents are [`Place::Layer`].
    pub tree: Tree,
    /// EROFS inodes of regular files.
    files: HashMap<InodeId, ErofsInode>,
}

impl LayerTree {
    /// The EROFS inode number of regular file `id`.
    pub fn nid(&self, id: InodeId) -> Option<u64> {
        self.files.get(&id).map(ErofsInode::id)
    }
}

/// A layer opened with `erofs-rs`.
pub struct LayerReader<'a> {
    fs: EroFS<Device<'a>>,
}

impl std::fmt::Debug for LayerReader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LayerReader")
    }
}

impl<'a> LayerReader<'a> {
    /// Opens the metadata image `meta` of a checked manifest.
    ///
    /// # Errors
    /// [`ReaderError::Erofs`] when `erofs-rs` refuses the superblock or device table.
    pub fn open(
        meta: &'a [u8],
        manifest: &Manifest,
        read_segment: &'a ReadSegment<'a>,
    ) -> Result<Self, ReaderError> {
        let bytes = Arc::new(Bytes {
            meta,
            read_segment,
            kept: Mutex::new(Vec::new()),
        });
        let segment = |index| Device::Segment(Arc::clone(&bytes), index);
        let devices = (0..manifest.segments.len()).map(segment).collect();
        Ok(Self {
            fs: run(EroFS::new_with_devices(
                Device::Meta(Arc::clone(&bytes)),
                devices,
            ))?,
        })
    }

    /// The whole tree. Reads metadata only.
    ///
    /// # Errors
    /// The first inode or directory that is damaged.
    pub fn tree(&self) -> Result<LayerTree, ReaderError> {
        let root = run(self.fs.get_inode(self.fs.super_block().root_inode_id()))?;
        let mut out = LayerTree {
            tree: Tree::new(self.meta(&root)?),
            files: HashMap::new(),
        };
        let mut ids: HashMap<u64, InodeId> = HashMap::from([(root.id(), ROOT)]);
        let mut dirs: HashMap<Vec<u8>, InodeId> = HashMap::from([(b"/".to_vec(), ROOT)]);
        let mut walk = run(self.fs.walk_dir("/"))?;
        while let Some(entry) = run(walk.next_entry()) {
            let entry = entry?;
            let name = entry.dir_entry.file_name();
            if name == b"." || name == b".." {
                continue;
            }
            let path = entry.dir_entry.path();
            let odd = |what| ReaderError::Odd {
                path: path.to_string_lossy().into_owned(),
                what,
            };
            let id = match ids.get(&entry.inode.id()) {
                // Two such directories in each other's place would make the walk as long as two to their depth.
                Some(_) if entry.inode.is_dir() => {
                    return Err(odd("it is a directory with a second name"));
                }
                Some(id) => *id,
                None => {
                    let inode = Inode {
                        meta: self.meta(&entry.inode)?,
                        kind: self
                            .kind(&entry.inode)
                            .map_err(|e| e.unwrap_or_else(|| odd("its type is unknown")))?,
                    };
                    let id = out.tree.add(inode);
                    ids.insert(entry.inode.id(), id);
                    if entry.inode.is_file() {
                        out.files.insert(id, entry.inode);
                    }
                    id
                }
            };
            if entry.inode.is_dir() {
                dirs.insert(path.as_bytes().to_vec(), id);
            }
            let parent = path
                .parent()
                .and_then(|p| dirs.get(p.as_bytes()))
                .copied()
                .ok_or_else(|| odd("its directory is missing"))?;
            let entries = out
                .tree
                .dir_mut(parent)
                .ok_or_else(|| odd("its parent is no directory"))?;
            entries.insert(name.to_vec(), id);
        }
        Ok(out)
    }

    fn meta(&self, inode: &ErofsInode) -> Result<Meta, ReaderError> {
        use std::os::unix::fs::PermissionsExt as _;
        let (sec, nsec) = inode.modified_unix();
        let perm = u16::try_from(inode.permissions().mode() & 0o7777).expect("12 bits");
        let xattrs: BTreeMap<Vec<u8>, Vec<u8>> = run(self.fs.xattrs_inode(*inode))?;
        Ok(Meta {
            perm,
            uid: inode.uid(),
            gid: inode.gid(),
            mtime: Mtime { sec, nsec },
            xattrs,
        })
    }

    fn kind(&self, inode: &ErofsInode) -> Result<Kind, Option<ReaderError>> {
        let device = || inode.device().ok_or(None);
        Ok(match inode.file_type() {
            FileType::RegularFile => Kind::File(Content {
                len: inode.data_size(),
                place: Place::Layer,
            }),
            FileType::Directory => Kind::Dir(BTreeMap::new()),
            FileType::Symlink => {
                let target = run(self.fs.read_link_inode(*inode)).map_err(|e| Some(e.into()))?;
                Kind::Symlink(target.as_bytes().to_vec())
            }
            FileType::CharacterDevice => device().map(|(major, minor)| Kind::Char(major, minor))?,
            FileType::BlockDevice => device().map(|(major, minor)| Kind::Block(major, minor))?,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::Unknown => return Err(None),
        })
    }

    /// Fills `buf` with the bytes of regular file `id` at `offset`; the range lies inside the file.
    ///
    /// # Errors
    /// [`ReaderError`] also when the file ends early.
    pub fn read_exact_at(
        &self,
        tree: &LayerTree,
        id: InodeId,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<(), ReaderError> {
        let odd = |what| ReaderError::Odd {
            path: format!("inode {}", id.0),
            what,
        };
        let inode = tree
            .files
            .get(&id)
            .ok_or_else(|| odd("it is no regular file"))?;
        let file = self.fs.open_inode_file(*inode)?;
        let mut done = 0;
        while done < buf.len() {
            let rest = buf.get_mut(done..).unwrap_or_default();
            match run(file.read_at(rest, offset + to_u64(done)))? {
                0 => return Err(odd("it ends early")),
                n => done += n,
            }
        }
        Ok(())
    }
}
