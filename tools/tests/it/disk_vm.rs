//! A disk as a block device, where the kernel has ublk.

/// A file system lives on it, its server is killed under a writer and comes back, a snapshot is taken while it is mounted.
///
/// Red when the device is made anew in place of being recovered: the mount is dead then.
#[test]
fn a_disk_is_a_block_device_in_the_vm() {
    let script = format!(
        r#"set -euo pipefail
        dsec={dsec}
        cd "$TMPDIR"
        $dsec disk create ./d --size 64MiB > /dev/null
        $dsec disk attach ./d --json > status
        device=$(sed -n 's/.*"path": "\(.*\)".*/\1/p' status)
        pid=$(sed -n 's/.*"pid": \([0-9]*\).*/\1/p' status)
        [ -b "$device" ]
        mkfs.ext4 -q "$device"
        mkdir mnt
        mount "$device" mnt
        seq 1 50000 > mnt/numbers
        sync
        $dsec disk snapshot ./d > /dev/null
        (! $dsec disk detach ./d 2> refused)
        grep -q "in use" refused
        seq 1 60000 > mnt/more
        sync mnt/more &
        kill -9 "$pid"
        flock d/lock true
        [ "$($dsec disk attach ./d)" = "$device" ]
        wait
        [ "$(tail -n 1 mnt/numbers)" = 50000 ]
        [ "$(tail -n 1 mnt/more)" = 60000 ]
        umount mnt
        $dsec disk detach ./d
        [ ! -e "$device" ]
        $dsec disk export ./d --to raw.img > /dev/null
        e2fsck -fn raw.img > /dev/null 2>&1
        mount -o loop,ro raw.img mnt
        seq 1 60000 | cmp - mnt/more
        umount mnt
        echo fine
        "#,
        dsec = env!("CARGO_BIN_EXE_dsec")
    );
    let out = test_vm::run(&["-t", "300", "--", "bash", "-c", &script]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(
        (out.status.code(), text(&out.stdout).trim()),
        (Some(0), "fine"),
        "{}",
        text(&out.stderr)
    );
}
