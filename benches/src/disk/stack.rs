//! Reading through sealed layers, and the merged index alone.

use std::path::Path;

use imgstore::disk::device::BlockDevice;
use imgstore::disk::folder::{DiskFolder, open_lower};
use imgstore::disk::map::Map;
use imgstore::disk::stack::Stack;
use imgstore::format::overlaybd::record::Record;
use imgstore::ids::to_u64;
use imgstore::media::Media;
use imgstore::media::file::FileMedia;

use super::{BLOCK, Random, Rows, as_f64, timed};
use crate::error::{Context, Result};

/// Layers of the stack.
const LAYERS: u64 = 10;
/// Bytes of its disk.
const DISK_BYTES: u64 = 1 << 30;
/// Random blocks written into each layer.
const BLOCKS_A_LAYER: u64 = 10_000;
/// Random reads.
const READS: usize = 300_000;
/// Look-ups.
const LOOKUPS: usize = 5_000_000;

/// A folder with ten sealed layers.
pub(crate) fn ten_layers(folder: &Path, blocks: u64) -> Result<DiskFolder> {
    DiskFolder::create(folder, Vec::new(), Some(DISK_BYTES)).during("making a disk")?;
    let open = DiskFolder::open(folder).during("opening a disk")?;
    let disk = open.disk();
    let mut random = Random::new(1);
    for _ in 0..LAYERS {
        for _ in 0..blocks {
            let at = random.below(DISK_BYTES / to_u64(BLOCK)) * to_u64(BLOCK);
            disk.write(&random.block(), at).during("writing")?;
        }
        open.snapshot().during("taking a snapshot")?;
    }
    Ok(open)
}

pub(crate) fn measure(rows: &mut Rows, scratch: &Path, scale: u64) -> Result<()> {
    let folder = scratch.join("layers");
    let blocks = BLOCKS_A_LAYER / scale;
    let open = ten_layers(&folder, blocks)?;
    let layers = open
        .state()
        .layers
        .iter()
        .map(|lower| open_lower(&folder, lower).during("opening a layer"))
        .collect::<Result<Vec<_>>>()?;
    let (stack, spent) = timed(|| Stack::new(&layers).during("merging the indexes"))?;
    let extents = stack.map().records().len();
    rows.add("extents of 10 layers merged", as_f64(to_u64(extents)), "");
    rows.add("merging 10 indexes", spent.wall.as_secs_f64() * 1e3, "ms");

    // Mapped blocks only: a hole costs nothing.
    let mut random = Random::new(2);
    let reads = READS / usize::try_from(scale).unwrap_or(1);
    let places: Vec<u64> = (0..reads)
        .filter_map(|_| {
            let at = random.below(to_u64(extents));
            let record = stack.map().records().get(usize::try_from(at).ok()?)?;
            Some(record.lba() * 512)
        })
        .collect();
    let mut buffer = vec![0; BLOCK];
    let read_all = |buffer: &mut [u8]| -> Result<()> {
        for at in &places {
            stack.read_at(buffer, *at).during("reading")?;
        }
        Ok(())
    };
    // Once to have all of it in the page cache.
    read_all(&mut buffer)?;
    let ((), spent) = timed(|| read_all(&mut buffer))?;
    rows.rate(
        "random 4 KiB reads, 10 layers, one thread",
        places.len(),
        spent,
    );
    drop(open);

    let path = scratch.join("flat");
    let file = FileMedia::create(&path).during("making a file")?;
    let blocks = blocks * LAYERS;
    for at in 0..blocks {
        file.write_at(&random.block(), at * to_u64(BLOCK))
            .during("writing")?;
    }
    let ((), spent) = timed(|| {
        for _ in 0..places.len() {
            let at = random.below(blocks) * to_u64(BLOCK);
            file.read_at(&mut buffer, at).during("reading")?;
        }
        Ok(())
    })?;
    rows.rate(
        "random 4 KiB reads, one flat file, one thread",
        places.len(),
        spent,
    );

    let lookups = LOOKUPS / usize::try_from(scale).unwrap_or(1);
    let million = Map::new((0..1_000_000).map(|n| Record::data(n * 16, 8, 8 + n * 8, 0)));
    for (name, map, sectors) in [
        ("look-ups in that index", stack.map(), DISK_BYTES / 512),
        (
            "look-ups in an index of 1,000,000 extents",
            &million,
            16_000_000,
        ),
    ] {
        // Made before: the numbers take as long as the look-ups.
        let asked: Vec<u64> = (0..lookups).map(|_| random.below(sectors)).collect();
        let (found, spent) = timed(|| {
            Ok(asked
                .iter()
                .map(|lba| usize::from(map.find(*lba).is_some()))
                .sum::<usize>())
        })?;
        assert!(found > 0, "half of the sectors are mapped");
        rows.rate(name, lookups, spent);
    }
    Ok(())
}
