//! What is mounted is not collected: leases on the origin, their life, and what happens where they cannot be written.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime};

use imgstore::build::{BuildOptions, build};
use imgstore::ids::{Digest, LayerRef, TagName};
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};
use imgstore::source::{self, SourceOptions, SourceSpec};
use imgstore::store::gc::{GcOptions, GcReport, collect};
use imgstore::store::{lease, tags};
use rustix::process::Signal;

use crate::daemon::{Daemon, SOON, detach, read_whole, until};
use crate::fixture::{World, noise};

fn origin(world: &World) -> DirOrigin {
    DirOrigin::open(&world.origin()).unwrap()
}

/// Collects without a grace period: only leases and tags protect.
fn gc(world: &World) -> GcReport {
    let options = GcOptions {
        grace: Duration::ZERO,
        ..GcOptions::default()
    };
    let report = collect(&origin(world), &options).unwrap();
    assert!(report.complete);
    report
}

/// Packs that are removed.
fn packs(report: &GcReport) -> usize {
    let is_pack = |d: &&imgstore::store::gc::mark::Doomed| d.object.starts_with("packs/");
    report.removed.iter().filter(is_pack).count()
}

/// The layers of the mount leases, by the leases' names.
fn leased(world: &World) -> Vec<(String, SystemTime, BTreeSet<Digest>)> {
    let found = lease::read_all(&origin(world)).unwrap();
    let mounts = found
        .into_iter()
        .filter(|f| f.info.name.starts_with("leases/mount-"));
    mounts
        .map(|f| {
            (
                f.info.name,
                f.info.modified,
                f.lease.unwrap().layers.into_iter().collect(),
            )
        })
        .collect()
}

fn untag(world: &World, tag: &str) {
    tags::untag(&origin(world), &tag.parse().unwrap()).unwrap();
}

/// Mutation, seen red: a mount that does not wait for its lease.
#[test]
fn a_mounted_layer_is_leased_from_before_the_mount_until_after_the_unmount() {
    let world = World::new();
    let (layer, data) = world.publish_data(3);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let leases = leased(&world);
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0].2, BTreeSet::from([layer.digest]));
    assert_eq!(daemon.metric("dsec_layerd_leased_layers "), 1);

    let reference: LayerRef = layer.digest.to_string().parse().unwrap();
    let refused = tags::remove(&origin(&world), &reference)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("in use") && refused.contains(&leases[0].0),
        "{refused}"
    );
    untag(&world, "base/t:1");
    assert_eq!(packs(&gc(&world)), 0);
    assert!(
        read_whole(&mnt.join("data")).unwrap() == data,
        "nothing of it was cached before"
    );

    daemon.client().umount(&mnt).unwrap();
    assert_eq!(leased(&world), []);
    assert_eq!(packs(&gc(&world)), layer.placement.packs.len());
    assert_eq!(daemon.metric("dsec_layerd_lease_failures_total "), 0);
    assert!(daemon.end(Signal::TERM));
}

/// Mutation, seen red: a lease with a name of its own for every process (the old one blocks `rm` until it runs out).
#[test]
fn the_next_control_process_takes_the_lease_over_and_renews_it() {
    let world = World::new();
    let (layer, data) = world.publish_data(2);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &["--lease", "2s"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    untag(&world, "base/t:1");
    let first = leased(&world);
    daemon.kill_control();
    assert_eq!(
        leased(&world),
        first,
        "mounts outlive the process, and so does the lease"
    );
    daemon.restart();
    until("the lease is renewed", || {
        leased(&world)
            .iter()
            .any(|l| l.1 > first[0].1 && l.2 == first[0].2)
    });
    assert_eq!(leased(&world).len(), 1);
    assert_eq!(leased(&world)[0].0, first[0].0);
    // Several times its time.
    let mut renewed = BTreeSet::new();
    until("the lease is renewed again and again", || {
        renewed.extend(leased(&world).into_iter().map(|l| l.1));
        renewed.len() > 6
    });
    assert_eq!(packs(&gc(&world)), 0);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(
        daemon.end(Signal::TERM),
        "a clean end unmounts and releases"
    );
    assert_eq!(leased(&world), []);
    assert_eq!(packs(&gc(&world)), layer.placement.packs.len());
}

fn publish_child(world: &World, tree: &Path, dict: Digest) -> Digest {
    let loaded = source::load(
        &SourceSpec::Directory(tree.to_owned()),
        &SourceOptions::new(world.dir.path()),
    )
    .unwrap();
    let options = BuildOptions {
        threads: 1,
        dict: vec![dict],
        ..BuildOptions::default()
    };
    let tag: TagName = "workspace/child:1".parse().unwrap();
    build((&loaded.tree).into(), tag.into(), &origin(world), &options)
        .unwrap()
        .layer
}

/// A child refers to segments in its parent's packs. The parent may go; its packs stay until the child goes.
///
/// Mutation, seen red: a layer that is followed to the first of its packs only.
#[test]
fn a_parents_packs_stay_while_a_child_is_mounted() {
    let world = World::new();
    let (parent, data) = world.publish_data(2);
    let tree = world.folder("child");
    fs::write(tree.join("data"), &data).unwrap();
    fs::write(tree.join("own"), &noise(400_000)[100_000..]).unwrap();
    let child = publish_child(&world, &tree, parent.digest);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["workspace/child:1"], &mnt, false);
    let parent_ref: LayerRef = parent.digest.to_string().parse().unwrap();
    assert_eq!(
        tags::remove(&origin(&world), &parent_ref).unwrap().tags,
        ["base/t:1"]
    );
    untag(&world, "workspace/child:1");
    let report = gc(&world);
    assert_eq!(packs(&report), 0);
    assert!(
        report
            .removed
            .iter()
            .any(|d| d.object.contains(&parent.digest.to_hex()))
    );
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(read_whole(&mnt.join("own")).unwrap() == noise(400_000)[100_000..]);
    daemon.client().umount(&mnt).unwrap();
    assert!(packs(&gc(&world)) >= 1);
    assert_eq!(origin(&world).list("packs/").unwrap(), [""; 0], "{child}");
}

/// A host that can only read: mounts work, one warning says what protects them, and the grace period does.
#[test]
fn an_origin_that_cannot_be_written_is_no_obstacle() {
    let world = World::new();
    let (_, data) = world.publish_data(2);
    let view = world.folder("view");
    let mount = |args: &[&str]| {
        let status = Command::new("mount").args(args).arg(&view).status();
        assert!(status.unwrap().success());
    };
    mount(&["--bind", world.origin().to_str().unwrap()]);
    mount(&["-o", "remount,bind,ro"]);
    let daemon = Daemon::start(world.dir.path(), &[format!("dir:{}", view.display())], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert_eq!(leased(&world), []);
    assert!(daemon.metric("dsec_layerd_lease_failures_total ") >= 1);
    assert_eq!(
        daemon.log().matches("no lease for what is mounted").count(),
        1
    );
    untag(&world, "base/t:1");
    // As old as can be: what lost its tag is kept all the same for the grace period.
    for info in origin(&world).list_info("").unwrap() {
        if !info.name.starts_with("leases/") {
            let file = fs::File::open(world.origin().join(&info.name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }
    }
    let report = collect(&origin(&world), &GcOptions::default()).unwrap();
    assert_eq!(report.removed, []);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    drop(daemon);
    detach(&view);
}

/// A directory whose collector stops before the first manifest goes, until it is told to go on.
#[derive(Debug)]
struct Held {
    inner: DirOrigin,
    /// Whether it has come there, and whether it may go on.
    gate: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Held {
    fn new(world: &World) -> Self {
        Self {
            inner: origin(world),
            gate: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn wait_until(&self, check: impl Fn(&(bool, bool)) -> bool) {
        let deadline = Instant::now() + SOON;
        let mut gate = self.gate.lock().unwrap();
        while !check(&gate) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "waited in vain");
            gate = self.changed.wait_timeout(gate, left).unwrap().0;
        }
    }

    fn set(&self, set: impl Fn(&mut (bool, bool))) {
        set(&mut self.gate.lock().unwrap());
        self.changed.notify_all();
    }
}

impl Origin for Held {
    fn address(&self) -> String {
        self.inner.address()
    }
    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.inner.fetch(object, range)
    }
    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.inner.fetch_all(object, max_len)
    }
    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.inner.create(object, content)
    }
    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.inner.replace(object, content)
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.inner.list(prefix)
    }
    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.inner.list_info(prefix)
    }
    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.inner.size(object)
    }
    fn remove(&self, object: &str) -> Result<(), OriginError> {
        if object.starts_with("manifests/") {
            self.set(|gate| gate.0 = true);
            self.wait_until(|gate| gate.1);
        }
        self.inner.remove(object)
    }
}

/// A mount of a layer that is being removed waits for the end of that. Then it fails, or its reads do: nothing of it is there, and
/// nothing else is read in its place. Turned red by: a claim that does not look at records.
#[test]
fn a_mount_of_a_layer_that_is_being_collected_waits_and_reads_nothing_wrong() {
    let world = World::new();
    let (layer, _) = world.publish_data(1);
    untag(&world, "base/t:1");
    let held = Held::new(&world);
    let mut daemon = Daemon::idle(world.dir.path(), &[world.origin_url()], &[]);
    daemon.env.push(("DSEC_LOG", "debug".to_owned()));
    daemon.restart();
    let mnt = world.folder("mnt");
    std::thread::scope(|scope| {
        let options = GcOptions {
            grace: Duration::ZERO,
            ..GcOptions::default()
        };
        let held = &held;
        let collector = scope.spawn(move || collect(held, &options).unwrap());
        held.wait_until(|gate| gate.0);
        let hex = layer.digest.to_hex();
        let (daemon, mnt) = (&daemon, &mnt);
        let mount = scope.spawn(move || daemon.try_mount(&[&hex], mnt, false).is_ok());
        until("the mount waits", || {
            daemon.log().contains("waiting for a collection to end")
        });
        assert!(!mount.is_finished(), "it waits for the collector");
        held.set(|gate| gate.1 = true);
        assert!(packs(&collector.join().unwrap()) >= 1);
        if mount.join().unwrap() {
            let error = read_whole(&mnt.join("data")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(5));
            daemon.client().umount(mnt).unwrap();
        }
    });
    assert_eq!(daemon.total().verify_failures, 0);
}
