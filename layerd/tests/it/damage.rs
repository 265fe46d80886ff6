//! Never a wrong byte: damage on the origin, in the cache, and in the descriptions of layers.

use std::fs;
use std::sync::atomic::Ordering;
use std::time::Duration;

use layerd_client::api::ErrorKind;
use layerd_client::client::ClientError;

use crate::daemon::{Daemon, read_cold, read_whole, until};
use crate::fixture::{World, cached};
use crate::web::Web;

#[test]
fn a_flipped_bit_on_the_origin_is_eio_and_a_log_line_never_a_wrong_byte() {
    let world = World::new();
    let (layer, data) = world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    web.faults().flip.store(true, Ordering::SeqCst);
    let path = mnt.join("data");
    let error = read_cold(&path, 0, 4096).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    let counters = daemon.total();
    assert_eq!(counters.served_bytes, 0);
    // Two tries for each read, and the kernel itself reads up to three times before it gives up.
    assert!(
        counters.verify_failures >= 2 && web.pack_requests() >= 2,
        "{counters:?}"
    );
    assert!(web.pack_requests() <= 6, "{}", web.pack_requests());
    let log = daemon.log();
    let line = log
        .lines()
        .find(|line| line.contains("damaged again"))
        .unwrap();
    let segment = layer.manifest.segments[0].digest().to_hex();
    let pack = layer.placement.packs[0].digest.to_hex();
    for part in [
        "ERROR",
        &layer.digest.to_hex(),
        "segment=",
        &format!("expected={segment}"),
        "found=",
        &format!("pack={pack}"),
        "offset=",
        &web.url(),
    ] {
        assert!(line.contains(part), "`{part}` is missing in: {line}");
    }
    // The cache now holds the damaged frame; it is not believed either.
    web.faults().flip.store(false, Ordering::SeqCst);
    assert!(read_cold(&path, 0, 4096).unwrap() == data[..4096]);
}

#[test]
fn a_damaged_first_origin_is_made_up_for_by_the_second() {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let (bad, good) = (
        Web::serve(&world.origin(), Duration::ZERO),
        Web::serve(&world.origin(), Duration::ZERO),
    );
    bad.faults().flip.store(true, Ordering::SeqCst);
    let daemon = Daemon::start(world.dir.path(), &[bad.url(), good.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
    assert_eq!(daemon.total().verify_failures, 1);
    assert_eq!((bad.pack_requests(), good.pack_requests()), (1, 1));
}

#[test]
fn damaged_cut_off_and_foreign_files_in_the_cache_are_fetched_again_once_each() {
    let world = World::new();
    let (layer, data) = world.publish_data(2);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &["--memory", "1MiB"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    assert!(read_whole(&path).unwrap() == data);
    let files: Vec<_> = layer
        .manifest
        .segments
        .iter()
        .map(|segment| cached(&daemon.cache(), &segment.digest()))
        .collect();
    until("everything is cached", || files.iter().all(|f| f.exists()));
    let mut flipped = fs::read(&files[0]).unwrap();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x10;
    fs::write(&files[0], &flipped).unwrap();
    let whole = fs::read(&files[1]).unwrap();
    fs::write(&files[1], &whole[..whole.len() / 3]).unwrap();
    fs::write(&files[2], b"").unwrap();
    fs::copy(&files[4], &files[3]).unwrap();
    let before = (web.pack_requests(), daemon.total().verify_failures);
    assert!(read_whole(&path).unwrap() == data);
    assert_eq!(daemon.total().verify_failures, before.1 + 4);
    assert_eq!(web.pack_requests(), before.0 + 4);
    assert!(read_whole(&path).unwrap() == data);
    assert_eq!(
        web.pack_requests(),
        before.0 + 4,
        "what was repaired is cached"
    );
}

#[test]
fn damaged_descriptions_of_a_layer_are_fetched_again() {
    let world = World::new();
    let (layer, data) = world.publish_data(1);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    daemon.client().umount(&mnt).unwrap();
    let folder = daemon.cache().join("layers").join(layer.digest.to_hex());
    for name in ["manifest.json", "placement.json", "meta.erofs"] {
        let path = folder.join(name);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, &bytes).unwrap();
        daemon.mount(&["base/t:1"], &mnt, false);
        assert!(read_whole(&mnt.join("data")).unwrap() == data, "{name}");
        daemon.client().umount(&mnt).unwrap();
        bytes[middle] ^= 1;
        assert!(fs::read(&path).unwrap() == bytes, "{name} is whole again");
    }
}

#[test]
fn damage_on_the_origin_that_stays_is_a_clear_error_and_leaves_nothing() {
    let world = World::new();
    let (layer, _) = world.publish_data(1);
    let hex = layer.digest.to_hex();
    let path = world
        .origin()
        .join("manifests")
        .join(&hex[..2])
        .join(format!("{hex}.json"));
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 10]).unwrap();
    fs::remove_dir_all(world.origin().join("bundles")).unwrap();
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    let error = daemon.try_mount(&["base/t:1"], &mnt, false).unwrap_err();
    let ClientError::Refused(error) = error else {
        panic!("{error}");
    };
    assert_eq!(error.kind, ErrorKind::Corrupt);
    assert!(error.message.contains("manifests/"), "{}", error.message);
    assert_eq!(daemon.client().mounts().unwrap().mounts, []);
    fs::write(&path, &bytes).unwrap();
    daemon.mount(&["base/t:1"], &mnt, false);
}
