//! The writer: a tree and the place of every chunk in, a metadata image out.
//!
//! Two passes. The first gives every inode its place: sizes depend on names, targets and chunk counts only. The second
//! writes, now that every inode number is known. Order is the tree's depth-first name order, so the image is a function of
//! its arguments alone.

use std::collections::HashMap;

use super::directory::{self, Entry};
use super::inode::{self, Data, FileMap, Numbers};
use super::superblock::{self, Device, SuperBlock};
use super::xattr;
use crate::format::manifest::Segment;
use crate::ids::{BLOCK_SIZE, Digest, round_up_to_block, to_u64, to_usize};
use crate::tree::{InodeId, Kind, ROOT, Tree};

/// A tree that EROFS, as used here, cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// An extended attribute that cannot be stored.
    #[error("cannot store extended attribute `{name}`: {why}; remove it or exclude it")]
    Xattr {
        /// Full name.
        name: String,
        /// The limit that it breaks.
        why: &'static str,
    },
    /// A file, attribute or tree that exceeds a limit of the format.
    #[error("cannot store `{path}`: {why}")]
    Limit {
        /// Path in the tree.
        path: String,
        /// The limit that it breaks.
        why: &'static str,
    },
}

/// Inode slots are 32 bytes, and an inode takes two.
const NID_UNIT: u64 = 32;
/// The first inode is not number 0, which `readdir` users take for a deleted entry.
const FIRST_INODE: u64 = 64;
/// Longest symbolic link target (`PATH_MAX` - 1).
const TARGET_MAX: usize = 4095;
/// Longest file name.
const NAME_MAX: usize = 255;

struct Placed {
    id: InodeId,
    parent: InodeId,
    xattrs: Vec<u8>,
    size: u64,
    data: Data,
    /// Bytes from the start of the inode area.
    offset: u64,
}

struct Plan {
    inodes: Vec<Placed>,
    index: HashMap<InodeId, usize>,
    /// Bytes of the inode area, whole blocks.
    area_len: u64,
    /// Blocks behind the inode area.
    data_blocks: u32,
}

fn size_of(tree: &Tree, id: InodeId) -> u64 {
    match &tree.inode(id).kind {
        Kind::File(content) => content.len,
        Kind::Symlink(target) => to_u64(target.len()),
        Kind::Dir(entries) => {
            // `.` and `..` sort among the names, so they must be placed among them.
            let mut names: Vec<&[u8]> = entries.keys().map(Vec::as_slice).collect();
            names.extend([&b"."[..], b".."]);
            names.sort_unstable();
            directory::size(names.iter().map(|name| name.len()))
        }
        Kind::Char(..) | Kind::Block(..) | Kind::Fifo | Kind::Socket => 0,
    }
}

fn check_limits(tree: &Tree, path: &[u8], id: InodeId) -> Result<(), EncodeError> {
    let inode = tree.inode(id);
    let name_len = path.rsplit(|b| *b == b'/').next().map_or(0, <[u8]>::len);
    let why = match &inode.kind {
        _ if name_len > NAME_MAX => "its name is longer than 255 bytes",
        _ if inode.meta.uid == u32::MAX || inode.meta.gid == u32::MAX => {
            "owner 4294967295 means `no owner` to the kernel"
        }
        _ if inode.meta.mtime.nsec >= 1_000_000_000 => {
            "its time has more than 999999999 nanoseconds"
        }
        Kind::Symlink(target) if target.is_empty() || target.len() > TARGET_MAX => {
            "its target must have 1 to 4095 bytes"
        }
        Kind::Symlink(target) if target.contains(&0) => "its target contains a NUL byte",
        Kind::Char(major, minor) | Kind::Block(major, minor)
            if !inode::dev_fits(*major, *minor) =>
        {
            "its device number exceeds 12 bits of major and 20 bits of minor"
        }
        Kind::File(content) if i64::try_from(content.len).is_err() => {
            "it is longer than 2^63-1 bytes"
        }
        _ => return Ok(()),
    };
    Err(EncodeError::Limit {
        path: String::from_utf8_lossy(path).into_owned(),
        why,
    })
}

/// The first place at or after `offset` where an inode starts on a slot and does not cross a block.
const fn inode_place(offset: u64) -> u64 {
    let slot = offset.next_multiple_of(NID_UNIT);
    if slot % BLOCK_SIZE > BLOCK_SIZE - 2 * NID_UNIT {
        round_up_to_block(slot)
    } else {
        slot
    }
}

/// Gives the inode and its tail a place at or after `offset`; `data_blocks` grows by the blocks its data needs.
fn place(
    offset: u64,
    header: u64,
    size: u64,
    kind: &Kind,
    map: Option<&FileMap>,
    data_blocks: &mut u32,
) -> (u64, Data, u64) {
    let aligned = inode_place(offset);
    match (kind, map) {
        (Kind::File(_), Some(map)) if size > 0 => {
            let index_at = (aligned + header).next_multiple_of(8);
            (
                aligned,
                Data::Chunks(map.chunk_bits),
                index_at + to_u64(map.chunks.len()) * 8,
            )
        }
        (Kind::Dir(_) | Kind::Symlink(_), _) => {
            let (whole, tail) = (
                u32::try_from(size / BLOCK_SIZE).unwrap_or(u32::MAX),
                size % BLOCK_SIZE,
            );
            let fits = tail > 0 && header + tail <= BLOCK_SIZE;
            let blocks = whole + u32::from(tail > 0 && !fits);
            let start = (blocks > 0).then_some(*data_blocks);
            *data_blocks += blocks;
            match (fits, start) {
                (false, start) => (
                    aligned,
                    start.map_or(Data::None, Data::Plain),
                    aligned + header,
                ),
                (true, start) => {
                    // The tail must lie in one block.
                    let crosses = (aligned + header) % BLOCK_SIZE + tail > BLOCK_SIZE;
                    let at = if crosses {
                        round_up_to_block(aligned + 1)
                    } else {
                        aligned
                    };
                    (at, Data::Inline(start), at + header + tail)
                }
            }
        }
        _ => (aligned, Data::None, aligned + header),
    }
}

fn plan(tree: &Tree, maps: &HashMap<InodeId, FileMap>) -> Result<Plan, EncodeError> {
    let mut plan = Plan {
        inodes: Vec::new(),
        index: HashMap::new(),
        area_len: 0,
        data_blocks: 0,
    };
    let mut parents: Vec<(Vec<u8>, InodeId)> = Vec::new();
    let mut end = FIRST_INODE;
    for (path, id) in tree.walk() {
        check_limits(tree, &path, id)?;
        while parents
            .last()
            .is_some_and(|(dir, _)| !is_inside(dir, &path))
        {
            parents.pop();
        }
        let parent = parents.last().map_or(ROOT, |(_, id)| *id);
        let inode = tree.inode(id);
        if matches!(inode.kind, Kind::Dir(_)) {
            parents.push((path.clone(), id));
        }
        if plan.index.contains_key(&id) {
            continue;
        }
        let xattrs = xattr::encode(&inode.meta.xattrs)?;
        let size = size_of(tree, id);
        let header = to_u64(inode::SIZE + xattrs.len());
        let (offset, data, next) = place(
            end,
            header,
            size,
            &inode.kind,
            maps.get(&id),
            &mut plan.data_blocks,
        );
        end = next;
        plan.index.insert(id, plan.inodes.len());
        plan.inodes.push(Placed {
            id,
            parent,
            xattrs,
            size,
            data,
            offset,
        });
    }
    plan.area_len = round_up_to_block(end);
    Ok(plan)
}

fn is_inside(dir: &[u8], path: &[u8]) -> bool {
    if dir.is_empty() {
        return !path.is_empty();
    }
    path.strip_prefix(dir)
        .is_some_and(|rest| rest.first() == Some(&b'/'))
}

impl Plan {
    fn placed(&self, id: InodeId) -> &Placed {
        self.index
            .get(&id)
            .and_then(|i| self.inodes.get(*i))
            .expect("every reachable inode was placed")
    }

    fn nid(&self, id: InodeId) -> u64 {
        self.placed(id).offset / NID_UNIT
    }

    /// The bytes of a directory or symbolic link.
    fn content(&self, tree: &Tree, placed: &Placed) -> Vec<u8> {
        match &tree.inode(placed.id).kind {
            Kind::Symlink(target) => target.clone(),
            Kind::Dir(entries) => {
                let entry = |name, id| Entry {
                    name,
                    nid: self.nid(id),
                    kind: inode::file_type(&tree.inode(id).kind),
                };
                let mut all: Vec<Entry<'_>> = entries
                    .iter()
                    .map(|(name, id)| entry(name.as_slice(), *id))
                    .collect();
                all.push(entry(b".", placed.id));
                all.push(entry(b"..", placed.parent));
                all.sort_unstable_by(|a, b| a.name.cmp(b.name));
                directory::encode(&all)
            }
            _ => Vec::new(),
        }
    }
}

fn put(image: &mut [u8], offset: u64, bytes: &[u8]) {
    let at = to_usize(offset);
    image
        .get_mut(at..at + bytes.len())
        .expect("the plan counted every byte")
        .copy_from_slice(bytes);
}

fn devices(segments: &[Segment], meta_blocks: u64) -> Result<Vec<Device>, EncodeError> {
    let too_big = |_e| EncodeError::Limit {
        path: "/".to_owned(),
        why: "metadata and data together exceed 16 TiB",
    };
    let mut first = meta_blocks;
    let mut out = Vec::with_capacity(segments.len());
    for segment in segments {
        let blocks = segment.len() / BLOCK_SIZE;
        out.push(Device {
            digest: segment.digest(),
            blocks: u32::try_from(blocks).map_err(too_big)?,
            first_block: u32::try_from(first).map_err(too_big)?,
        });
        first += blocks;
    }
    // The last block number must also stay below the hole mark.
    u32::try_from(first + 1).map_err(too_big)?;
    Ok(out)
}

/// Writes the metadata image of `tree`. `maps` has an entry for every regular file that is not empty; `segments` are the
/// devices that the maps refer to.
///
/// # Errors
/// [`EncodeError`] names what the format cannot hold.
pub fn image(
    tree: &Tree,
    maps: &HashMap<InodeId, FileMap>,
    segments: &[Segment],
) -> Result<Vec<u8>, EncodeError> {
    let plan = plan(tree, maps)?;
    let area_start = round_up_to_block(to_u64(
        superblock::SLOTS_OFFSET + segments.len() * superblock::SLOT_SIZE,
    ));
    let data_start = area_start + plan.area_len;
    let len = data_start + u64::from(plan.data_blocks) * BLOCK_SIZE;
    let first_data_block =
        u32::try_from(data_start / BLOCK_SIZE).map_err(|_e| EncodeError::Limit {
            path: "/".to_owned(),
            why: "its metadata exceeds 16 TiB",
        })?;
    let devices = devices(segments, len / BLOCK_SIZE)?;
    let mut image = vec![0; to_usize(len)];
    let links = tree.link_counts();
    for (number, placed) in plan.inodes.iter().enumerate() {
        let inode = tree.inode(placed.id);
        let shift = |block: u32| block + first_data_block;
        let data = match placed.data {
            Data::Plain(block) => Data::Plain(shift(block)),
            Data::Inline(block) => Data::Inline(block.map(shift)),
            other => other,
        };
        let numbers = Numbers {
            mode: inode.mode(),
            xattr_icount: xattr::icount(placed.xattrs.len()),
            size: placed.size,
            ino: u32::try_from(number + 1).unwrap_or(u32::MAX),
            nlink: links.get(&placed.id).copied().unwrap_or(1),
        };
        let at = area_start + placed.offset;
        put(
            &mut image,
            at,
            &inode::encode(&inode.meta, &inode.kind, data, &numbers),
        );
        put(&mut image, at + to_u64(inode::SIZE), &placed.xattrs);
        let tail_at = at + to_u64(inode::SIZE + placed.xattrs.len());
        if let (Data::Chunks(_), Some(map)) = (data, maps.get(&placed.id)) {
            put(
                &mut image,
                tail_at.next_multiple_of(8),
                &map.encode(&devices),
            );
            continue;
        }
        let content = plan.content(tree, placed);
        let whole = match data {
            Data::Plain(_) => content.len(),
            Data::Inline(_) => content.len() - content.len() % 4096,
            Data::None | Data::Chunks(_) => 0,
        };
        let (blocks, tail) = content.split_at(whole);
        if let Data::Plain(block) | Data::Inline(Some(block)) = data {
            put(&mut image, u64::from(block) * BLOCK_SIZE, blocks);
        }
        put(&mut image, tail_at, tail);
    }
    let mut sb = SuperBlock {
        inodes: to_u64(plan.inodes.len()),
        blocks: u32::try_from(len / BLOCK_SIZE).unwrap_or(u32::MAX),
        meta_block: u32::try_from(area_start / BLOCK_SIZE).unwrap_or(u32::MAX),
        root_nid: u16::try_from(plan.nid(ROOT)).expect("the root is the first inode"),
        devices: u16::try_from(devices.len()).expect("the manifest allows at most 65535 segments"),
        uuid: [0; 16],
    };
    superblock::write(&mut image, &sb, &devices);
    let digest = Digest::of(&image);
    let (uuid, _) = digest
        .as_bytes()
        .split_first_chunk::<16>()
        .expect("a digest has 32 bytes");
    sb.uuid = *uuid;
    put(&mut image, to_u64(superblock::OFFSET + 4), &[0; 4]);
    superblock::write(&mut image, &sb, &devices);
    Ok(image)
}
