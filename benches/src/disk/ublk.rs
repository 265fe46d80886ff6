//! Through ublk, beside other ways in the same run: where the kernel has it, which may be an emulated machine. What is worth reading
//! there is how one way compares with another, so each row has its ratio.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use fuse_driver::disk_file::DiskFile;
use imgstore::disk::bytewise::Bytewise;
use imgstore::disk::device::BlockDevice;
use imgstore::disk::layer::Layer;
use imgstore::disk::stack::Stack;
use imgstore::ids::{to_u64, to_usize};
use imgstore::media::file::FileMedia;
use ublk_driver::{Content, Driver, Options};

use super::paths::{open_direct, pread};
use super::stack::ten_layers;
use super::{BLOCK, Random, Rows, as_f64, timed};
use crate::command::shell;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::mounts::{Backing, Mounted, erofs};

/// Blocks written into each of ten layers.
const BLOCKS_A_LAYER: u64 = 2_000;
/// Random reads.
const READS: u64 = 10_000;
/// Bytes of the file that is read in order, and of each read.
const FILE_BYTES: u64 = 64 << 20;
const STEP: usize = 1 << 20;

/// Of rows that were measured in an emulator.
fn note() -> Result<&'static str> {
    let path = Path::new("/proc/cpuinfo");
    let text = fs::read_to_string(path).on("read", path)?;
    Ok(if text.contains("QEMU TCG") {
        ", emulated (TCG)"
    } else {
        ""
    })
}

struct Bench<'a> {
    rows: &'a mut Rows,
    note: &'static str,
    scale: u64,
    driver: Driver,
}

impl Bench<'_> {
    fn ratio(&mut self, what: &str, ublk: f64, other: f64) {
        self.rows
            .add(format!("{what}{}", self.note), ublk / other, "x");
    }

    /// Random reads past the page cache; a second.
    fn random(&mut self, what: &str, file: &File, places: &[u64], threads: usize) -> Result<f64> {
        let spent = pread(file, places, threads)?;
        let what = format!(
            "random 4 KiB reads (O_DIRECT), {what}, {threads} threads{}",
            self.note
        );
        self.rows.rate(&what, places.len(), spent);
        Ok(as_f64(to_u64(places.len())) / spent.wall.as_secs_f64())
    }

    /// Reads a file in order with nothing of it in the page cache; MiB a second.
    fn in_order(&mut self, what: &str, path: &Path, bytes: u64) -> Result<f64> {
        host::drop_caches()?;
        let file = File::open(path).on("open", path)?;
        let mut buffer = vec![0; STEP];
        let ((), spent) = timed(|| {
            for at in (0..bytes).step_by(STEP) {
                let len = (bytes - at).min(to_u64(STEP));
                let part = buffer.get_mut(..to_usize(len)).unwrap_or_default();
                file.read_exact_at(part, at).on("read", path)?;
            }
            Ok(())
        })?;
        let rate = as_f64(bytes >> 20) / spent.wall.as_secs_f64();
        let what = format!("reading in order, cold, {what}{}", self.note);
        self.rows.add(what, rate, "MiB/s");
        Ok(rate)
    }

    /// A disk of ten layers: the device beside the FUSE file.
    fn disk(&mut self, scratch: &Path) -> Result<()> {
        let open = ten_layers(&scratch.join("ublk-layers"), BLOCKS_A_LAYER / self.scale)?;
        let view = open.disk().view();
        let base = view.base.clone();
        let lbas: Vec<u64> = base.map_or_else(Vec::new, |base| {
            base.map().records().iter().map(|r| r.lba() * 512).collect()
        });
        let mut random = Random::new(7);
        let places: Vec<u64> = (0..READS / self.scale)
            .filter_map(|_| {
                lbas.get(to_usize(random.below(to_u64(lbas.len()))))
                    .copied()
            })
            .collect();
        let path = scratch.join("ublk-fuse.img");
        let device = Arc::new(Bytewise::new(open.disk()));
        let file = DiskFile::mount(&path, device, SystemTime::now()).during("mounting")?;
        let measured = (|| {
            let file = open_direct(&path)?;
            let one = self.random("FUSE file, 10 layers", &file, &places, 1)?;
            let four = self.random("FUSE file, 10 layers", &file, &places, 4)?;
            let order = self.in_order("FUSE file, 10 layers", &path, FILE_BYTES / self.scale)?;
            Ok((one, four, order))
        })();
        file.unmount(true).during("unmounting")?;
        let fuse = measured?;
        let disk: Arc<dyn BlockDevice> = open.disk();
        let device = self
            .driver
            .add(Content::Disk(disk), &Options::default())
            .during("making a device")?;
        let file = open_direct(device.path())?;
        let one = self.random("ublk, 10 layers", &file, &places, 1)?;
        let four = self.random("ublk, 10 layers", &file, &places, 4)?;
        let order = self.in_order("ublk, 10 layers", device.path(), FILE_BYTES / self.scale)?;
        drop(file);
        device.remove().during("removing a device")?;
        self.ratio("ublk : FUSE file, random 4 KiB, one thread", one, fuse.0);
        self.ratio("ublk : FUSE file, random 4 KiB, four threads", four, fuse.1);
        self.ratio("ublk : FUSE file, in order", order, fuse.2);
        Ok(())
    }

    /// A mounted image: its large file at random and in order; reads a second, MiB a second.
    fn image(&mut self, what: &str, root: &Path, places: &[u64]) -> Result<(f64, f64)> {
        let path = root.join("large");
        let order = self.in_order(what, &path, FILE_BYTES / self.scale)?;
        host::drop_caches()?;
        let file = File::open(&path).on("open", &path)?;
        let spent = pread(&file, places, 1)?;
        let name = format!("random 4 KiB reads, cold, {what}{}", self.note);
        self.rows.rate(&name, places.len(), spent);
        Ok((
            as_f64(to_u64(places.len())) / spent.wall.as_secs_f64(),
            order,
        ))
    }

    /// An EROFS image on a device beside the same image as a file.
    fn erofs(&mut self, scratch: &Path) -> Result<()> {
        let (tree, image, at) = (
            scratch.join("tree"),
            scratch.join("image.erofs"),
            scratch.join("at"),
        );
        for folder in [&tree, &at] {
            fs::create_dir(folder).on("make", folder)?;
        }
        let bytes = FILE_BYTES / self.scale;
        let mut random = Random::new(8);
        let large: Vec<u8> = (0..bytes / to_u64(BLOCK))
            .flat_map(|_| random.block())
            .collect();
        let path = tree.join("large");
        fs::write(&path, large).on("write", &path)?;
        shell(
            "mkfs.erofs --quiet \"$1\" \"$2\"",
            &[image.as_os_str(), tree.as_os_str()],
        )?;
        fs::remove_file(&path).on("remove", &path)?;
        let blocks = bytes / to_u64(BLOCK);
        let places: Vec<u64> = (0..READS / self.scale)
            .map(|_| random.below(blocks) * to_u64(BLOCK))
            .collect();
        let file = {
            // The folder must be on a disk file system: Linux 6.12 refuses images on tmpfs.
            let _mounted = erofs(&image, &at, Backing::Buffered)?;
            self.image("EROFS on a file", &at, &places)?
        };
        let medium = Arc::new(FileMedia::open(&image).on("open", &image)?);
        let layer = Layer::raw(medium, "image").during("opening the image")?;
        let stack = Arc::new(Stack::new(&[layer]).during("opening the image")?);
        let options = Options {
            partitions: false,
            ..Options::default()
        };
        let device = self
            .driver
            .add(Content::Disk(stack), &options)
            .during("making a device")?;
        let ublk = {
            let _mounted = on_device(device.path(), &at)?;
            self.image("EROFS on ublk", &at, &places)?
        };
        device.remove().during("removing a device")?;
        self.ratio("EROFS on ublk : on a file, random 4 KiB", ublk.0, file.0);
        self.ratio("EROFS on ublk : on a file, in order", ublk.1, file.1);
        Ok(())
    }
}

fn on_device(device: &Path, at: &Path) -> Result<Mounted> {
    erofs(device, at, Backing::Buffered)
}

pub(crate) fn measure(rows: &mut Rows, scratch: &Path, scale: u64) -> Result<()> {
    ublk_driver::probe().map_err(|why| {
        Error::Unexpected(format!("ublk cannot be measured on this kernel: {why}"))
    })?;
    let mut bench = Bench {
        rows,
        note: note()?,
        scale,
        driver: Driver::start(1).during("starting the driver")?,
    };
    let folder: PathBuf = scratch.to_owned();
    bench.disk(&folder)?;
    bench.erofs(&folder)
}
