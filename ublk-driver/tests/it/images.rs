//! Images: read-only, answered in their own time.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ublk_driver::{Content, Device, Driver, Options, UblkError};

use crate::contents::{How, MemImage, pattern};
use crate::shell::{nodes, read_direct, sh, until};

fn device(image: &Arc<MemImage>) -> Device {
    let driver = Driver::start(0).unwrap();
    let content = Content::Image(Arc::<MemImage>::clone(image));
    driver.add(content, &Options::default()).unwrap()
}

/// An EROFS image of a few files, and the folder it was made of.
fn erofs(folder: &str) -> Vec<u8> {
    sh(&format!(
        "mkdir -p {folder}/tree/sub {folder}/mnt; cp -r /etc/ssl /usr/include/linux {folder}/tree/sub/; echo hello > {folder}/tree/small
         head -c 3000000 /dev/urandom > {folder}/tree/large; mkfs.erofs {folder}/image {folder}/tree >/dev/null 2>&1"
    ));
    let mut bytes = fs::read(format!("{folder}/image")).unwrap();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

pub(crate) fn an_erofs_image_is_mounted_and_equal() {
    let folder = "/run/tmp/erofs";
    let image = MemImage::new(erofs(folder), How::Later);
    let device = device(&image);
    let path = device.path().display().to_string();
    sh(&format!(
        "fsck.erofs {path}; mount -t erofs {path} {folder}/mnt; diff -r --no-dereference {folder}/tree {folder}/mnt"
    ));
    image.answer(How::AtOnce);
    sh(&format!(
        "echo 3 > /proc/sys/vm/drop_caches; diff -r --no-dereference {folder}/tree {folder}/mnt; umount {folder}/mnt"
    ));
    assert_eq!(sh(&format!("blockdev --getro {path}")), "1\n");
    assert_eq!(
        sh(&format!(
            "cat /sys/block/{}/queue/discard_max_bytes",
            &path[5..]
        )),
        "0\n"
    );
    let refused = crate::shell::write_direct(device.path(), 0, &[0; 4096], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(nix::libc::EPERM), "{refused}");
    device.remove().unwrap();
    assert_eq!(nodes(), [""; 0]);
}

/// Mutation seen red: `without_privilege` left out.
pub(crate) fn partitions_are_looked_for_only_where_wanted() {
    let driver = Driver::start(0).unwrap();
    for partitions in [true, false] {
        let image = MemImage::new(pattern(1 << 20, 9), How::Later);
        let options = Options {
            partitions,
            ..Options::default()
        };
        let content = Content::Image(Arc::<MemImage>::clone(&image));
        let device = driver.add(content, &options).unwrap();
        assert_eq!(image.questions() > 0, partitions);
        device.remove().unwrap();
    }
}

pub(crate) fn answers_that_are_wrong_late_or_missing_are_errors() {
    let bytes = pattern(1 << 20, 3);
    let image = MemImage::new(bytes.clone(), How::AtOnce);
    let device = device(&image);
    for how in [How::Fail, How::Short, How::Forget] {
        image.answer(how);
        let error = read_direct(device.path(), 4096, 8192).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EIO), "{how:?}");
        image.answer(How::Later);
        assert!(
            read_direct(device.path(), 4096, 8192).unwrap() == bytes[4096..12288],
            "{how:?}"
        );
    }
}

pub(crate) fn a_device_in_use_is_not_removed_and_by_force_it_is() {
    let folder = "/run/tmp/in-use";
    let image = MemImage::new(erofs(folder), How::Later);
    let device = device(&image);
    let path = device.path().display().to_string();
    sh(&format!(
        "mount -t erofs {path} {folder}/mnt; cmp {folder}/tree/small {folder}/mnt/small"
    ));
    assert!(matches!(device.remove(), Err(UblkError::InUse(_))));
    sh(&format!(
        "diff -r --no-dereference {folder}/tree {folder}/mnt; echo 3 > /proc/sys/vm/drop_caches"
    ));
    // Bytes behind an inode, where some images (ours do not) keep the end of a file.
    let inline = fs::File::open(format!("{folder}/mnt/small")).unwrap();
    let large = fs::File::open(format!("{folder}/mnt/large")).unwrap();
    sh("echo 3 > /proc/sys/vm/drop_caches");
    device.remove_by_force().unwrap();
    sh("echo 3 > /proc/sys/vm/drop_caches");
    let mut bytes = [1; 6];
    let error = large.read_exact_at(&mut bytes, 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    let error = fs::read_dir(format!("{folder}/mnt/sub/ssl"))
        .map(|_| ())
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EUCLEAN));
    // fixme: this is the kernel's doing (6.12), and why nothing of ours takes a mounted device away unless its process ends. The
    // size of a disk that is taken away becomes 0, and EROFS' metadata, read through the block device's page cache, is zeros behind
    // its end. See docs/decisions/0013.
    let read = inline.read_exact_at(&mut bytes, 0).map(|()| bytes);
    assert_eq!(read.unwrap(), [0; 6]);
    drop((inline, large));
    sh(&format!("umount {folder}/mnt"));
    assert_eq!(nodes(), [""; 0]);
}

/// Mutation seen red: `give_up` left out of `take_away` (removal waits for the answer).
pub(crate) fn a_read_that_is_never_answered_does_not_hold_up_removal() {
    let image = MemImage::new(pattern(1 << 20, 4), How::AtOnce);
    let device = device(&image);
    image.answer(How::Hang);
    let path = device.path().to_owned();
    let reader = std::thread::spawn(move || read_direct(&path, 0, 4096));
    until("the question is there", || image.hanging() > 0);
    device.remove().unwrap();
    let error = reader.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    for late in image.kept() {
        late(Ok(&[1; 4096]));
    }
    assert_eq!(nodes(), [""; 0]);
}
