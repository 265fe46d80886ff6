//! Disks: writable, answered on workers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ublk_driver::{Content, Device, Driver, Options};

use crate::contents::{FileDisk, pattern};
use crate::shell::{nodes, read_direct, sh, write_direct};

const MIB: u64 = 1 << 20;

fn device(path: &str, bytes: u64) -> (Arc<FileDisk>, Device) {
    let disk = FileDisk::open(Path::new(path), bytes);
    let driver = Driver::start(0).unwrap();
    let content = Content::Disk(Arc::<FileDisk>::clone(&disk));
    (disk, driver.add(content, &Options::default()).unwrap())
}

/// What was written through the page cache and never synced is in the disk after the removal.
pub(crate) fn a_file_system_is_made_used_and_found_again() {
    let (_, device) = device("/run/tmp/ext4.disk", 64 * MIB);
    let path = device.path().display().to_string();
    sh(&format!(
        "mkdir -p /run/tmp/m; mkfs.ext4 -q {path}; mount {path} /run/tmp/m; cp -r /usr/include/linux /run/tmp/m/; umount /run/tmp/m
         e2fsck -fn {path}; printf 'not synced' | dd of={path} bs=1 seek=8 conv=notrunc status=none"
    ));
    device.remove().unwrap();
    assert_eq!(nodes(), [""; 0]);
    sh(
        "mount -o loop /run/tmp/ext4.disk /run/tmp/m; diff -r --no-dereference /usr/include/linux /run/tmp/m/linux; umount /run/tmp/m",
    );
    let disk = std::fs::read("/run/tmp/ext4.disk").unwrap();
    assert_eq!(&disk[8..18], b"not synced");
}

/// The verify job of the recovery test too.
pub(crate) fn fio(path: &str, size: &str) -> String {
    format!(
        "fio --name=v --filename={path} --direct=1 --rw=randwrite --bsrange=4k-128k --size={size} --iodepth=16 --ioengine=libaio \
         --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_dump=0 --output-format=terse"
    )
}

/// Mutation seen red: offsets of writes one sector off.
pub(crate) fn what_is_written_at_random_is_read_back() {
    let (_, device) = device("/run/tmp/verify.disk", 24 * MIB);
    sh(&fio(&device.path().display().to_string(), "24m"));
    device.remove().unwrap();
}

pub(crate) fn discards_and_zeros_are_exact() {
    let (disk, device) = device("/run/tmp/zeros.disk", 4 * MIB);
    let bytes = pattern(4 << 20, 5);
    write_direct(device.path(), 0, &bytes, 0).unwrap();
    let path = device.path().display().to_string();
    for (command, at) in [("blkdiscard", MIB), ("blkdiscard -z", 2 * MIB)] {
        let before = disk.discarded.load(Ordering::SeqCst);
        sh(&format!("{command} -o {at} -l {} {path}", 8192));
        assert_eq!(
            disk.discarded.load(Ordering::SeqCst) - before,
            8192,
            "{command}"
        );
    }
    let mut expected = bytes;
    for at in [1 << 20, 2 << 20] {
        expected[at..at + 8192].fill(0);
    }
    assert!(read_direct(device.path(), 0, 4 << 20).unwrap() == expected);
    device.remove().unwrap();
}

/// Mutation seen red: `is_fua` ignored.
pub(crate) fn flushes_and_forced_writes_reach_the_disk() {
    let (disk, device) = device("/run/tmp/durable.disk", 4 * MIB);
    let name = device
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        sh(&format!(
            "cat /sys/block/{name}/queue/write_cache /sys/block/{name}/queue/fua"
        )),
        "write back\n1\n"
    );
    let flushes = || disk.flushes.load(Ordering::SeqCst);
    let before = flushes();
    write_direct(device.path(), 0, &[7; 4096], 0).unwrap();
    assert_eq!(flushes(), before);
    write_direct(device.path(), 0, &[8; 4096], nix::libc::O_DSYNC).unwrap();
    // The write's own, and another because the file is opened so.
    assert_eq!(flushes(), before + 2, "a forced write");
    std::fs::File::options()
        .write(true)
        .open(device.path())
        .unwrap()
        .sync_all()
        .unwrap();
    assert_eq!(flushes(), before + 3, "a sync");
    device.remove().unwrap();
}

pub(crate) fn errors_reach_the_caller() {
    let (disk, device) = device("/run/tmp/errors.disk", 4 * MIB);
    let cases = [
        (nix::libc::ENOSPC, nix::libc::ENOSPC),
        (nix::libc::EIO, nix::libc::EIO),
        // What the block layer has no word for.
        (nix::libc::EROFS, nix::libc::EIO),
        (nix::libc::EAGAIN, nix::libc::EIO),
    ];
    for (failure, expected) in cases {
        disk.failure
            .store(u64::try_from(failure).unwrap(), Ordering::SeqCst);
        let write = write_direct(device.path(), 0, &[9; 4096], 0).unwrap_err();
        assert_eq!(write.raw_os_error(), Some(expected), "{failure}");
        let read = read_direct(device.path(), 0, 4096).unwrap_err();
        assert_eq!(read.raw_os_error(), Some(expected), "{failure}");
        let file = std::fs::File::options()
            .write(true)
            .open(device.path())
            .unwrap();
        file.sync_all().unwrap_err();
    }
    disk.failure.store(0, Ordering::SeqCst);
    write_direct(device.path(), 0, &[9; 4096], 0).unwrap();
    assert!(read_direct(device.path(), 0, 4096).unwrap() == [9; 4096]);
    device.remove().unwrap();
}
