//! Layers on 3FS, mounted: `dir:` and `3fs:` over stand-ins with its semantics and its library's ABI, not over 3FS.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use imgstore::build::{BuildOptions, build};
use imgstore::format::names;
use imgstore::ids::TagName;
use imgstore::origin::url::OriginUrl;
use imgstore::source::{self, SourceOptions, SourceSpec};
use imgstore::store::layer::{self, Layer};
use rustix::process::Signal;
use three_fs_stand_in::control::Control;
use three_fs_stand_in::mount::{CHUNK_BYTES, Event, StandIn};

use crate::daemon::{Daemon, read_cold, read_whole};
use crate::fixture::{World, noise};

const MIB: usize = 6;
const KIB: usize = 1024;

/// A layer with one file of noise, published and to be mounted through a stand-in.
struct OnThreeFs {
    // Unmounted before its folders go.
    mount: StandIn,
    world: World,
    layer: Layer,
    data: Vec<u8>,
}

impl OnThreeFs {
    fn new() -> Self {
        let world = World::new();
        let mount = StandIn::mount(&world.folder("behind"), &world.folder("3fs"));
        fs::create_dir_all(mount.point().join("3fs-virt/iovs")).unwrap();
        let tree = world.folder("tree");
        let data = noise(MIB << 20);
        fs::write(tree.join("data"), &data).unwrap();
        let url: OriginUrl = format!("dir:{}/origin", mount.point().display())
            .parse()
            .unwrap();
        let origin = url.open_or_create().unwrap();
        let loaded = source::load(
            &SourceSpec::Directory(tree),
            &SourceOptions::new(world.dir.path()),
        );
        let tag: TagName = "base/t:1".parse().unwrap();
        let tree = &loaded.unwrap().tree;
        let report = build(tree.into(), tag.into(), &*origin, &BuildOptions::default()).unwrap();
        let layer = layer::open(&*origin, &report.layer).unwrap();
        Self {
            mount,
            world,
            layer,
            data,
        }
    }

    fn url(&self, kind: &str) -> String {
        format!("{kind}:{}/origin", self.mount.point().display())
    }

    fn pack(&self) -> String {
        names::pack(&self.layer.placement.packs[0].digest)
    }

    /// A daemon that waits little, in a folder of its own, with the layer mounted: it and the file.
    fn mounted(&self, kind: &str, folder: &str) -> (Daemon, PathBuf) {
        let args = ["--read-deadline", "3s"];
        let folder = self.world.folder(folder);
        let daemon = Daemon::start(&folder, &[self.url(kind)], &args);
        daemon.mount(&["base/t:1"], &folder.join("mnt"), false);
        (daemon, folder.join("mnt/data"))
    }

    /// Reads a block of each segment from 16 threads: how many were right, and how many were EIO. Anything else fails.
    fn read_all(&self, file: &Path) -> (usize, usize) {
        let (mut right, mut refused) = (0, 0);
        let offsets: Vec<usize> = (0..self.data.len()).step_by(256 * KIB).collect();
        std::thread::scope(|scope| {
            let read =
                |offset: usize| move || read_cold(file, u64::try_from(offset).unwrap(), 4096);
            let readers: Vec<_> = offsets
                .iter()
                .map(|at| (*at, scope.spawn(read(*at))))
                .collect();
            for (at, reader) in readers {
                match reader.join().unwrap() {
                    Ok(block) => {
                        assert!(block == self.data[at..at + 4096], "other bytes at {at}");
                        right += 1;
                    }
                    Err(e) => {
                        assert_eq!(e.raw_os_error(), Some(5), "{e}");
                        refused += 1;
                    }
                }
            }
        });
        (right, refused)
    }
}

/// Requests stay inside of chunks also when `layerd` joins segments into one range.
#[test]
fn a_layer_on_a_three_fs_mount_is_read_inside_of_chunks() {
    let on = OnThreeFs::new();
    let (daemon, file) = on.mounted("dir", "d");
    let pack = on.mount.inode(&format!("origin/{}", on.pack()));
    on.mount.take_events();
    assert!(read_whole(&file).unwrap() == on.data);
    let events = on.mount.take_events().into_iter();
    let reads: Vec<(u64, u64)> = events
        .filter_map(|event| match event {
            Event::Read(ino, offset, len) if ino == pack => Some((offset, u64::from(len))),
            _ => None,
        })
        .collect();
    assert!(reads.len() >= MIB, "{reads:?}");
    for (offset, len) in reads {
        assert_eq!(
            offset / CHUNK_BYTES,
            (offset + len - 1) / CHUNK_BYTES,
            "{offset} {len}"
        );
    }
    assert_eq!(daemon.total().verify_failures, 0);
}

/// A lost chunk of a pack: right bytes or EIO, and all is right when it is back.
#[test]
fn lost_chunks_give_eio_and_never_zeros_on_both_ways() {
    for kind in ["dir", "3fs"] {
        let on = OnThreeFs::new();
        let pack = format!("origin/{}", on.pack());
        for (chunk, keep) in [(0, 4096), (2, 0), (4, CHUNK_BYTES / 2)] {
            on.mount.lose(&pack, chunk, keep);
        }
        let (daemon, file) = on.mounted(kind, "d");
        let (right, refused) = on.read_all(&file);
        assert!(right >= 10 && refused >= 8, "{kind}: {right} {refused}");
        on.mount.heal();
        assert_eq!(on.read_all(&file), (24, 0), "{kind}: {}", daemon.log());
    }
}

/// Right bytes, EIO where the library gives nothing better, right bytes when it does again. Before origins were
/// closed at its end, `layerd` left shared memory behind.
#[test]
fn a_layer_is_read_through_rings_whatever_they_answer() {
    let on = OnThreeFs::new();
    let point = on.mount.point();
    for (n, lines) in [&["reverse"][..], &["early"], &["capacity 1"]]
        .iter()
        .enumerate()
    {
        Control::write(point, lines);
        let (daemon, file) = on.mounted("3fs", &format!("d{n}"));
        assert_eq!(on.read_all(&file), (24, 0), "{lines:?}: {}", daemon.log());
    }
    for (n, line) in ["result -5", "cut 7", "result 0"].iter().enumerate() {
        Control::write(point, &[line]);
        let (daemon, file) = on.mounted("3fs", &format!("e{n}"));
        assert_eq!(on.read_all(&file), (0, 24), "{line}: {}", daemon.log());
        Control::write(point, &[]);
        assert_eq!(on.read_all(&file), (24, 0), "{line}: {}", daemon.log());
    }
    let (mut daemon, file) = on.mounted("3fs", "f");
    assert_eq!(on.read_all(&file), (24, 0));
    let pid = daemon.pid();
    let links = point.join("3fs-virt/iovs");
    let (shared, linked) = (begun_by(Path::new("/dev/shm"), pid), begun_by(&links, pid));
    // A ring and its memory each.
    assert!(
        (2..=16).contains(&shared) && shared == linked,
        "{shared} {linked}"
    );
    assert!(daemon.end(Signal::TERM));
    assert_eq!(begun_by(Path::new("/dev/shm"), pid), 0);
    assert_eq!(begun_by(&links, pid), 0);
}

/// Names in a folder that the library made for a process.
fn begun_by(folder: &Path, pid: u32) -> usize {
    let (id, file) = (format!("{pid:08x}-"), format!("hf3fs-iov-{pid:08x}-"));
    let names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name.starts_with(&id) || name.starts_with(&file))
        .count()
}

/// The program starts without the library; what needs it says what to do.
#[test]
fn without_the_library_three_fs_is_refused_with_advice() {
    let on = OnThreeFs::new();
    // Another origin does not want it.
    let (_daemon, file) = on.mounted("dir", "d");
    assert_eq!(on.read_all(&file), (24, 0));
    let out = Command::new(env!("CARGO_BIN_EXE_layerd"))
        .args(["--origin", &on.url("3fs")])
        .arg("--cache")
        .arg(on.world.path("cache"))
        .arg("--socket")
        .arg(on.world.path("socket"))
        .env("DSEC_HF3FS_LIB", "/nowhere/libhf3fs_api_shared.so")
        .output()
        .unwrap();
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success());
    assert!(text.contains("cannot load 3FS's library"), "{text}");
    assert!(
        text.contains(&format!("or use `{}`", on.url("dir"))),
        "{text}"
    );
}
