//! The built-in image of the self-test: one of everything that layers rely on, in a few blocks.
//!
//! Two segments hold blocks that all differ. The files refer to them in every way a layer does: whole chunks that touch,
//! blocks with holes between them, blocks that jump, a chunk beyond 4 GiB, inline and separate links and directories,
//! attributes, times with nanoseconds, links, devices.

use std::collections::{BTreeMap, HashMap};

use imgstore::format::erofs::inode::{ChunkAddr, FileMap};
use imgstore::format::erofs::superblock::Device;
use imgstore::format::erofs::write;
use imgstore::format::frame;
use imgstore::format::manifest::{Blob, FORMAT, Manifest, Segment, Totals};
use imgstore::ids::{Digest, to_u64};
use imgstore::tree::{Content, Inode, InodeId, Kind, Meta, Mtime, Place, ROOT, Tree};

const BLOCK: usize = 4096;
/// Blocks of the two segments.
const SEGMENT_BLOCKS: [u32; 2] = [4, 128];
/// Size of the large file: its last chunk lies beyond 4 GiB.
const LARGE_BYTES: u64 = (5 << 30) + 1000;
/// log2 of its chunk size in blocks (4 MiB).
const LARGE_CHUNK_BITS: u8 = 10;
/// Entries of the folder whose list takes more than one block.
const MANY: usize = 200;

/// How the chunk indexes name a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Addressing {
    /// In the flat address space, as all layers do.
    Flat,
    /// By device, as no layer does: some kernels read that wrong, and the self-test must notice.
    Slots,
}

/// A segment, and its frame as an origin would have it.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) digest: Digest,
    pub(super) frame: Vec<u8>,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct TestImage {
    pub(super) tree: Tree,
    pub(super) maps: HashMap<InodeId, FileMap>,
    pub(super) manifest: Manifest,
    pub(super) meta: Vec<u8>,
    pub(super) parts: Vec<Part>,
    plain: Vec<Vec<u8>>,
}

/// Blocks that all differ and compress well.
fn segment(number: u32, blocks: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for block in 0..blocks {
        let seed = [number.to_le_bytes(), block.to_le_bytes()].concat();
        out.extend(Digest::of(&seed).as_bytes().repeat(BLOCK / 32));
    }
    out
}

/// Puts files into a tree.
struct Maker {
    tree: Tree,
    maps: HashMap<InodeId, FileMap>,
}

impl Maker {
    fn meta() -> Meta {
        Meta {
            perm: 0o644,
            uid: 70_000,
            gid: 80_000,
            mtime: Mtime {
                sec: -5,
                nsec: 123_456_789,
            },
            xattrs: BTreeMap::new(),
        }
    }

    fn add(&mut self, folder: InodeId, name: &str, kind: Kind) -> InodeId {
        let id = self.tree.add(Inode {
            meta: Self::meta(),
            kind,
        });
        self.link(folder, name, id);
        id
    }

    fn link(&mut self, folder: InodeId, name: &str, id: InodeId) {
        if let Some(Kind::Dir(entries)) = self.tree.inodes.get_mut(folder.0).map(|i| &mut i.kind) {
            entries.insert(name.as_bytes().to_vec(), id);
        }
    }

    fn file(
        &mut self,
        name: &str,
        len: u64,
        chunk_bits: u8,
        chunks: Vec<Option<(u16, u32)>>,
    ) -> InodeId {
        let place = Place::Layer;
        let id = self.add(ROOT, name, Kind::File(Content { len, place }));
        if !chunks.is_empty() {
            let address = |(device, block)| ChunkAddr { device, block };
            let chunks = chunks.into_iter().map(|c| c.map(address)).collect();
            self.maps.insert(id, FileMap { chunk_bits, chunks });
        }
        id
    }
}

/// The tree. `jump`: the distance of blocks at which a kernel that mixes up addresses takes a jump for a neighbour.
fn tree(jump: u32) -> Maker {
    let mut root = Maker::meta();
    root.perm = 0o1777;
    let mut maker = Maker {
        tree: Tree::new(root),
        maps: HashMap::new(),
    };
    maker.file("empty", 0, 0, Vec::new());
    let small = maker.file("small", 100, 0, vec![Some((1, 0))]);
    maker.link(ROOT, "small-again", small);
    if let Some(inode) = maker.tree.inodes.get_mut(small.0) {
        for (name, value) in [
            ("user.dsec", b"value".to_vec()),
            ("trusted.dsec", vec![7; 300]),
            ("security.dsec", b"\0\xff".to_vec()),
        ] {
            inode.meta.xattrs.insert(name.as_bytes().to_vec(), value);
        }
    }
    maker.file(
        "touching",
        32 * 4096 - 100,
        4,
        vec![Some((2, 0)), Some((2, 16))],
    );
    let holes = (0..64).map(|n| (n % 2 == 0).then_some((2, n))).collect();
    maker.file("holes", 64 * 4096, 0, holes);
    let pair = |n: u32| [Some((2, n)), Some((2, n + jump + n)), None];
    let jumps: Vec<_> = (0..3).flat_map(pair).collect();
    maker.file("jumps", to_u64(jumps.len() * BLOCK), 0, jumps);
    let chunk_bytes = 4096 << LARGE_CHUNK_BITS;
    let mut chunks = vec![None; imgstore::ids::to_usize(LARGE_BYTES / chunk_bytes)];
    chunks.push(Some((1, 3)));
    maker.file("large", LARGE_BYTES, LARGE_CHUNK_BITS, chunks);
    maker.add(ROOT, "link", Kind::Symlink(b"small".to_vec()));
    maker.add(ROOT, "long-link", Kind::Symlink(vec![b'x'; 4095]));
    maker.add(ROOT, "whiteout", Kind::Char(0, 0));
    maker.add(ROOT, "device", Kind::Block(259, 1_048_575));
    maker.add(ROOT, "pipe", Kind::Fifo);
    let many = maker.add(ROOT, "many", Kind::Dir(BTreeMap::new()));
    for n in 0..MANY {
        let name = format!("an-entry-with-a-name-of-some-length-{n:03}");
        maker.link(many, &name, small);
    }
    maker
}

/// Puts device ids and blocks within devices into the indexes of a file.
fn use_slots(meta: &mut [u8], map: &FileMap, devices: &[Device]) {
    let flat = map.encode(devices);
    let Some(at) = meta.windows(flat.len()).position(|w| w == flat) else {
        return;
    };
    for (n, chunk) in map.chunks.iter().enumerate() {
        let Some(addr) = chunk else { continue };
        let device = addr.device.to_le_bytes();
        let block = addr.block.to_le_bytes();
        let index = [&[0; 2][..], &device, &block].concat();
        let target = meta.get_mut(at + n * 8..at + n * 8 + 8);
        target
            .expect("the indexes were found there")
            .copy_from_slice(&index);
    }
}

impl TestImage {
    /// The image.
    pub(super) fn new(addressing: Addressing) -> Self {
        let plain: Vec<Vec<u8>> = (0..)
            .zip(SEGMENT_BLOCKS)
            .map(|(number, blocks)| segment(number, blocks))
            .collect();
        let segments: Vec<Segment> = plain
            .iter()
            .map(|bytes| Segment(Digest::of(bytes), to_u64(bytes.len())))
            .collect();
        let write = |maker: &Maker| {
            write::image(&maker.tree, &maker.maps, &segments).expect("the test image is small")
        };
        // The length of the metadata does not depend on where the blocks are.
        let meta_blocks = u32::try_from(write(&tree(0)).len() / BLOCK).expect("a few blocks");
        let [first, second] = SEGMENT_BLOCKS;
        let maker = tree(meta_blocks + first);
        let mut meta = write(&maker);
        if addressing == Addressing::Slots {
            let starts = [(meta_blocks, first), (meta_blocks + first, second)];
            let devices: Vec<Device> = segments
                .iter()
                .zip(starts)
                .map(|(segment, (first_block, blocks))| Device {
                    digest: segment.digest(),
                    blocks,
                    first_block,
                })
                .collect();
            for map in maker.maps.values().filter(|map| map.chunks.len() > 2) {
                use_slots(&mut meta, map, &devices);
            }
        }
        let blob = |bytes: &[u8]| Blob {
            digest: Digest::of(bytes),
            size: to_u64(bytes.len()),
        };
        let part = |bytes: &Vec<u8>| Part {
            digest: Digest::of(bytes),
            frame: frame::encode(bytes, 1),
        };
        Self {
            manifest: Manifest {
                chunks: blob(b""),
                features_compat: Vec::new(),
                features_incompat: Vec::new(),
                format: FORMAT,
                meta: blob(&meta),
                segments,
                totals: Totals::default(),
            },
            parts: plain.iter().map(part).collect(),
            tree: maker.tree,
            maps: maker.maps,
            meta,
            plain,
        }
    }

    /// Bytes of a file in `[from, to)`, as the kernel must give them.
    pub(super) fn content(&self, id: InodeId, from: u64, to: u64) -> Vec<u8> {
        let mut out = Vec::new();
        let map = self.maps.get(&id);
        for block in from / 4096..to.div_ceil(4096) {
            out.extend(
                map.and_then(|map| self.block(map, block))
                    .unwrap_or(&[0; BLOCK]),
            );
        }
        let skip = imgstore::ids::to_usize(from % 4096);
        out.drain(..skip.min(out.len()));
        out.truncate(imgstore::ids::to_usize(to - from));
        out
    }

    fn block(&self, map: &FileMap, block: u64) -> Option<&[u8]> {
        let chunk = imgstore::ids::to_usize(block >> map.chunk_bits);
        let addr = (*map.chunks.get(chunk)?)?;
        let within = block & ((1 << map.chunk_bits) - 1);
        let at = imgstore::ids::to_usize((u64::from(addr.block) + within) * 4096);
        let segment = self.plain.get(usize::from(addr.device).checked_sub(1)?)?;
        segment.get(at..at + BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use imgstore::format::erofs::check::check;
    use imgstore::format::flat::FlatLayout;

    #[test]
    fn the_image_is_one_that_layers_may_have() {
        let image = TestImage::new(Addressing::Flat);
        check(&image.meta, &image.manifest).unwrap();
        let layer = image.manifest.layer();
        Manifest::parse(&image.manifest.to_bytes(), &layer).unwrap();
        let frames: usize = image.parts.iter().map(|part| part.frame.len()).sum();
        assert!(image.meta.len() < 128 << 10, "{}", image.meta.len());
        assert!(frames < 32 << 10, "{frames}");
        // The jump must stay inside the second segment.
        let start = FlatLayout::new(&image.manifest).segment_start(1).unwrap() / 4096;
        assert!(start + 8 < u64::from(SEGMENT_BLOCKS[1]), "{start}");
        assert_ne!(image.meta, TestImage::new(Addressing::Slots).meta);
    }
}
