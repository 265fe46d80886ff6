//! The FUSE file, and `pread` beside io_uring on a local file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuse_driver::disk_file::DiskFile;
use imgstore::disk::bytewise::Bytewise;
use imgstore::disk::folder::DiskFolder;
use imgstore::ids::{to_u64, to_usize};

use super::{BLOCK, Random, Rows, Spent, sys, timed};
use crate::error::{Context, Result};
use crate::host;

/// Random reads through FUSE.
const FUSE_READS: usize = 60_000;
/// Random reads of a local file.
const LOCAL_READS: usize = 40_000;
/// Bytes of the local file.
const LOCAL_BYTES: u64 = 512 << 20;
/// Requests of io_uring at a time, and threads of `pread` beside it.
const DEPTH: usize = 16;

pub(crate) fn open_direct(path: &Path) -> Result<File> {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or(0);
    OpenOptions::new()
        .read(true)
        .custom_flags(direct)
        .open(path)
        .on("open", path)
}

/// Reads at these places with `pread`, on so many threads.
pub(crate) fn pread(file: &File, places: &[u64], threads: usize) -> Result<Spent> {
    let ((), spent) = timed(|| {
        std::thread::scope(|scope| {
            let parts = places.chunks(places.len().div_ceil(threads));
            let mut running = Vec::new();
            for part in parts {
                let read = move || -> std::io::Result<()> {
                    let mut room = vec![0; 2 * BLOCK];
                    let buffer = sys::aligned(&mut room, BLOCK);
                    for at in part {
                        file.read_exact_at(buffer, *at)?;
                    }
                    Ok(())
                };
                let named = std::thread::Builder::new().name("reader".to_owned());
                running.push(
                    named
                        .spawn_scoped(scope, read)
                        .during("starting a thread")?,
                );
            }
            for thread in running {
                let read = thread.join();
                read.unwrap_or_else(|_| Err(std::io::Error::other("a reader panicked")))
                    .during("reading")?;
            }
            Ok(())
        })
    })?;
    Ok(spent)
}

fn fuse(rows: &mut Rows, scratch: &Path, scale: u64) -> Result<()> {
    let folder = scratch.join("layers");
    let open = DiskFolder::open(&folder).during("opening the disk")?;
    let view = open.disk().view();
    let base = view.base.as_ref();
    let lbas: Vec<u64> = base
        .map(|base| base.map().records().iter().map(|r| r.lba() * 512).collect())
        .unwrap_or_default();
    let mut random = Random::new(5);
    let reads = FUSE_READS / to_usize(scale);
    let places: Vec<u64> = (0..reads)
        .filter_map(|_| {
            lbas.get(to_usize(random.below(to_u64(lbas.len()))))
                .copied()
        })
        // O_DIRECT reads whole blocks.
        .map(|at| at / to_u64(BLOCK) * to_u64(BLOCK))
        .collect();
    let path = scratch.join("fuse.img");
    let device = Arc::new(Bytewise::new(open.disk()));
    let file = DiskFile::mount(&path, device, SystemTime::now()).during("mounting")?;
    let measured = (|| {
        let direct = open_direct(&path)?;
        for threads in [1, 4] {
            let spent = pread(&direct, &places, threads)?;
            rows.rate(
                &format!("random 4 KiB reads through the FUSE file (O_DIRECT), 10 layers, {threads} threads"),
                places.len(),
                spent,
            );
        }
        Ok(())
    })();
    file.unmount(true).during("unmounting")?;
    measured
}

fn local(rows: &mut Rows, scratch: &Path, scale: u64) -> Result<()> {
    let path = scratch.join("local");
    let file = File::create(&path).on("make", &path)?;
    let mut random = Random::new(6);
    let bytes = LOCAL_BYTES / scale;
    let chunk: Vec<u8> = (0..256).flat_map(|_| random.block()).collect();
    let mut at = 0;
    while at < bytes {
        file.write_all_at(&chunk, at).on("write", &path)?;
        at += to_u64(chunk.len());
    }
    file.sync_all().on("sync", &path)?;
    let places: Vec<u64> = (0..LOCAL_READS / to_usize(scale))
        .map(|_| random.below(bytes / to_u64(BLOCK)) * to_u64(BLOCK))
        .collect();
    let warm = File::open(&path).on("open", &path)?;
    pread(&warm, &places, 1)?;
    let cold = open_direct(&path)?;
    host::drop_caches()?;
    for (state, file) in [("page cache", &warm), ("disk, O_DIRECT", &cold)] {
        if state == "page cache" {
            pread(file, &places, 1)?;
        }
        for threads in [1, DEPTH] {
            let spent = pread(file, &places, threads)?;
            let what = format!("local file, {state}: pread, {threads} threads");
            rows.rate(&what, places.len(), spent);
        }
        for depth in [1, DEPTH] {
            let ((), spent) = timed(|| sys::uring_reads(file, &places, depth).during("reading"))?;
            let what = format!("local file, {state}: io_uring, one thread, depth {depth}");
            rows.rate(&what, places.len(), spent);
        }
    }
    Ok(())
}

pub(crate) fn measure(rows: &mut Rows, scratch: &Path, scale: u64) -> Result<()> {
    fuse(rows, scratch, scale)?;
    local(rows, scratch, scale)
}
