//! Programs that know nothing of us read what we write: `zstd`, `fsck.erofs` and `dump.erofs` of Debian 12, and the
//! kernel with one device per segment.
//!
//! erofs-utils 1.5 counts the devices it is given: it accepts neither the metadata image nor the flat image without one
//! `--device=` per segment. It finds data by flat addresses in the first image alone, so extraction needs the flat image
//! (and the devices, to be counted). Its extraction drops holes (a file of one hole and one byte comes out one byte long),
//! and it sets owners after modes, which clears setuid bits; so the tree here has neither.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use imgstore::build::BuildOptions;
use imgstore::ids::Digest;
use imgstore::origin::dir::DirOrigin;
use imgstore::store::layer::{self, Layer};

use crate::build::build_as;
use crate::kernel_mount::{KernelMount, write_flat};
use crate::model::{load_path, run, sh};
use crate::observe::{assert_same, expected, observe};
use crate::random_tree::{Rng, random_tree};

/// A published tree, its metadata image and its segments as files.
struct Published {
    dir: tempfile::TempDir,
    origin: DirOrigin,
    layer: Layer,
    meta: PathBuf,
    segments: Vec<PathBuf>,
}

impl Published {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("lib/deep")).unwrap();
        let mut rng = Rng::new(7);
        fs::write(tree.join("lib/noise"), rng.bytes(700_000)).unwrap();
        let numbers: Vec<String> = (0..90_000).map(|n| format!("{n}\n")).collect();
        fs::write(tree.join("lib/numbers"), numbers.concat()).unwrap();
        for n in 0..60 {
            let len = usize::try_from(rng.below(9000)).unwrap();
            fs::write(tree.join(format!("lib/deep/file-{n:03}")), rng.bytes(len)).unwrap();
        }
        sh(
            &tree,
            "ln lib/noise noise; ln -s lib/noise link; ln -s $(printf '%0300d' 1)/x long; : > empty; mkfifo pipe
            setfattr -n user.a -v b lib/noise; chmod 0711 lib/numbers; touch -d '1960-01-01' lib",
        );
        let origin = DirOrigin::create_root(&dir.path().join("origin")).unwrap();
        let loaded = load_path(&tree);
        let report = build_as(&loaded.tree, "1", &origin, &BuildOptions::default());
        let layer = layer::open(&origin, &report.layer).unwrap();
        assert!(layer.manifest.segments.len() > 8, "a tree of many segments");
        let (meta, segments) = write_parts(&origin, &report.layer, dir.path());
        Self {
            dir,
            origin,
            layer,
            meta,
            segments,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn segment(&self, index: usize) -> Vec<u8> {
        layer::read_segment(&self.origin, &self.layer, index).unwrap()
    }

    /// A program of erofs-utils with one `--device=` per segment.
    fn erofs_utils(&self, program: &str, args: &[&str], image: &Path) -> Output {
        let devices = self.segments.iter();
        let devices = devices.map(|d| format!("--device={}", d.display()));
        Command::new(program)
            .args(devices)
            .args(args)
            .arg(image)
            .output()
            .unwrap()
    }

    fn pack_file(&self) -> PathBuf {
        let packs = &self.layer.placement.packs;
        assert_eq!(packs.len(), 1);
        let hex = packs[0].digest.to_hex();
        self.path(&format!("origin/packs/{}/{hex}.zst", &hex[..2]))
    }
}

#[test]
fn zstd_unpacks_a_pack_to_the_segments_in_order() {
    let published = Published::new();
    let pack = published.pack_file();
    let plain = run("zstd", &["-dqc", pack.to_str().unwrap()]);
    let count = published.layer.manifest.segments.len();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|index| published.layer.placement.segments[*index].1);
    let wanted: Vec<u8> = order.iter().flat_map(|i| published.segment(*i)).collect();
    assert!(
        plain == wanted,
        "{} and {} bytes",
        plain.len(),
        wanted.len()
    );
    let listing = run("zstd", &["-lv", pack.to_str().unwrap()]);
    let listing = String::from_utf8(listing).unwrap();
    let line = |name: &str| {
        let found = listing.lines().find(|line| line.starts_with(name));
        let value = found.unwrap_or_else(|| panic!("no `{name}` in {listing}"));
        value.split(": ").nth(1).unwrap().to_owned()
    };
    assert_eq!(line("# Zstandard Frames"), count.to_string());
    assert_eq!(line("# Skippable Frames"), "1");
    let size = line("Decompressed Size");
    assert!(size.ends_with(&format!("({} B)", wanted.len())), "{size}");
}

/// The seek table as zstd's `contrib/seekable_format` describes it, read from the end.
#[test]
fn seek_table_is_right() {
    let published = Published::new();
    let pack = fs::read(published.pack_file()).unwrap();
    let number = |at: usize| u32::from_le_bytes(pack[at..at + 4].try_into().unwrap());
    let len = pack.len();
    assert_eq!(number(len - 4), 0x8F92_EAB1);
    assert_eq!(pack[len - 5], 0, "no checksums, no reserved bits");
    let frames = usize::try_from(number(len - 9)).unwrap();
    assert_eq!(frames, published.layer.manifest.segments.len());
    let table = len - 9 - 8 * frames;
    assert_eq!(number(table - 8), 0x184D_2A5E);
    assert_eq!(usize::try_from(number(table - 4)).unwrap(), 8 * frames + 9);
    let mut spots = published.layer.placement.segments.clone();
    spots.sort_by_key(|spot| spot.1);
    let mut at = 0;
    for (n, spot) in spots.iter().enumerate() {
        assert_eq!((spot.1, spot.2), (at, number(table + 8 * n)), "frame {n}");
        at += u64::from(spot.2);
    }
    assert_eq!(
        at,
        u64::try_from(table - 8).unwrap(),
        "nothing between frames and table"
    );
    let plain: u64 = (0..frames)
        .map(|n| u64::from(number(table + 8 * n + 4)))
        .sum();
    assert_eq!(plain, published.layer.manifest.segment_bytes());
}

#[test]
fn fsck_erofs_accepts_the_metadata_and_extracts_the_flat_image() {
    let published = Published::new();
    // It ends with status 0 even if the superblock's checksum is wrong: what it says counts.
    let clean = |output: Output, wanted: &str| {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        if output.status.success() && said.contains(wanted) && !said.contains("<E>") {
            Ok(())
        } else {
            Err(said)
        }
    };
    let fsck = |args: &[&str], image: &Path, wanted: &str| {
        let args = [&["-d3"], args].concat();
        clean(published.erofs_utils("fsck.erofs", &args, image), wanted)
    };
    let right = "No errors found";
    fsck(&[], &published.meta, right).unwrap();
    let flat = published.path("flat");
    write_flat(&published.origin, &published.layer.digest, &flat);
    let out = published.path("extracted");
    fsck(
        &[&format!("--extract={}", out.display())],
        &flat,
        "Extracted filesystem successfully",
    )
    .unwrap();
    sh(
        published.dir.path(),
        "diff -r --no-dereference tree/lib extracted/lib; cmp tree/noise extracted/noise",
    );
    let modes = "find . ! -name pipe -printf '%p %y %m %U:%G %T@ %l\\n' | sort";
    assert_eq!(sh(&published.path("tree"), modes), sh(&out, modes));
    // The check can fail: one bit of the superblock.
    let mut meta = fs::read(&published.meta).unwrap();
    meta[1024 + 0x40] ^= 1;
    fs::write(published.path("bad"), meta).unwrap();
    let error = fsck(&[], &published.path("bad"), right).unwrap_err();
    assert!(error.contains("chksum"), "{error}");
}

#[test]
fn dump_erofs_reads_the_metadata() {
    let published = Published::new();
    let dump = |args: &[&str]| {
        let output = published.erofs_utils("dump.erofs", args, &published.meta);
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let line = |text: &str, name: &str| {
        let found = text.lines().find(|line| line.starts_with(name));
        found
            .unwrap_or_else(|| panic!("no `{name}` in {text}"))
            .to_owned()
    };
    let superblock = dump(&["-s"]);
    let features = line(&superblock, "Filesystem features:");
    assert!(
        features.ends_with("sb_csum mtime chunked_file device_table "),
        "{features}"
    );
    let inodes = published.layer.manifest.totals.inodes;
    let count = line(&superblock, "Filesystem inode count:");
    assert!(
        count.ends_with(&format!(" {inodes}")),
        "{count}, not {inodes}"
    );
    let listing = dump(&["--ls", "--path=/"]);
    for name in ["empty", "lib", "link", "long", "noise", "pipe"] {
        assert!(
            listing
                .lines()
                .any(|line| line.ends_with(&format!("  {name}"))),
            "{listing}"
        );
    }
    let file = dump(&["-e", "--path=/lib/noise"]);
    assert!(
        file.contains("Size: 700000 ") && file.contains("/lib/noise: 11 extents found"),
        "{file}"
    );
}

#[test]
fn kernel_reads_flat_and_with_a_device_per_segment_alike() {
    let published = Published::new();
    let tree = load_path(&published.path("tree")).tree;
    let wanted = expected(&tree);
    let digest = published.layer.digest;
    let flat = KernelMount::of(&published.origin, &digest);
    assert_same(&observe(flat.path()), &wanted);
    let devices = KernelMount::with_devices(&published.meta, &published.segments);
    assert_same(&observe(devices.path()), &wanted);
}

/// Random trees with holes: names, types and attributes come from the metadata image alone, on either path.
#[test]
fn kernel_lists_random_trees_with_a_device_per_segment() {
    for seed in 0..6 {
        let (tree, _spool) = random_tree(seed, 60);
        let dir = tempfile::tempdir().unwrap();
        let origin = DirOrigin::create_root(&dir.path().join("origin")).unwrap();
        let report = build_as(&tree, "1", &origin, &BuildOptions::default());
        let (meta, devices) = write_parts(&origin, &report.layer, dir.path());
        let mount = KernelMount::with_devices(&meta, &devices);
        let no_content = |listing: crate::observe::Listing| {
            let mut listing = listing;
            let files = listing
                .values_mut()
                .filter(|seen| seen.mode & 0o170_000 == 0o100_000);
            files.for_each(|seen| seen.content.clear());
            listing
        };
        assert_same(
            &no_content(observe(mount.path())),
            &no_content(expected(&tree)),
        );
    }
}

/// Metadata image and segments of a layer as files.
fn write_parts(origin: &DirOrigin, digest: &Digest, dir: &Path) -> (PathBuf, Vec<PathBuf>) {
    let layer = layer::open(origin, digest).unwrap();
    let meta = dir.join("meta");
    fs::write(&meta, layer::read_meta(origin, &layer.manifest).unwrap()).unwrap();
    let write = |index| {
        let path = dir.join(format!("segment-{index}"));
        fs::write(&path, layer::read_segment(origin, &layer, index).unwrap()).unwrap();
        path
    };
    (
        meta,
        (0..layer.manifest.segments.len()).map(write).collect(),
    )
}
