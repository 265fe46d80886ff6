//! A disk as a block device, where the kernel has ublk: in the test VM.

use crate::world::{World, dsec, json, ok, sh};
use crate::{disk_power, disk_random};

/// How much of something, from the environment of `tools/soak`.
pub(crate) fn amount(name: &str, usual: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(usual, |text| text.parse().unwrap())
}

/// A number that nobody has had.
pub(crate) fn chance() -> u64 {
    use std::io::Read as _;
    let mut bytes = [0; 8];
    let mut file = std::fs::File::open("/dev/urandom").unwrap();
    file.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

#[test]
fn strangers_use_a_disk_in_the_vm() {
    let long = std::env::var_os("DSEC_DISK_OPERATIONS").is_some();
    test_vm::suite(
        "disk_vm::strangers_use_a_disk_in_the_vm",
        &["-t", if long { "3000" } else { "280" }],
        &[
            ("ext4", || file_system("mkfs.ext4 -q", "e2fsck -fn")),
            ("xfs", || file_system("mkfs.xfs -q", "xfs_repair -n")),
            ("fio", what_fio_wrote_is_read_back),
            ("kills", disk_power::killed_servers_lose_nothing),
            ("random", || {
                disk_random::works(
                    amount("DSEC_DISK_SEED", chance() >> 40),
                    amount("DSEC_DISK_OPERATIONS", 400),
                );
            }),
        ],
    );
}

/// A disk of its own, attached; the world and the device.
fn attached(size: &str) -> (World, String) {
    let world = World::new();
    ok(dsec(&world, &["disk", "create", "./d", "--size", size]));
    let status = json(&ok(dsec(&world, &["disk", "attach", "./d", "--json"])));
    let device = status.get("path").unwrap().as_str().unwrap().to_owned();
    (world, device)
}

/// Made, filled, unmounted, mounted again; snapshots while it is filled, and the disk's files, without the
/// driver, hold the same.
///
/// Red when a discard changes nothing: `fstrim` then brings back what `mkfs` had found and the checker sees it.
fn file_system(make: &str, check: &str) {
    let (world, device) = attached("320MiB");
    let script = format!(
        r#"dsec={dsec}
        mkdir m
        {make} {device}
        mount {device} m
        cp -r /usr/include/linux/netfilter m/first
        $dsec disk snapshot ./d > layer
        cp -r /usr/include/linux/netfilter m/second &
        $dsec disk snapshot ./d > layer
        wait $!
        sync -f m
        rm -r m/second
        mkdir m/third
        for n in 1 2 3 4 5 6 7 8; do head -c 300000 /dev/urandom > m/third/$n; done
        (cd m/third && sha256sum *) > sums
        fstrim m
        umount m
        {check} {device} >&2
        mount {device} m
        diff -r --no-dereference /usr/include/linux/netfilter m/first >&2
        (cd m/third && sha256sum --quiet -c ../../sums) >&2
        umount m
        $dsec disk detach ./d
        $dsec disk export ./d --to raw > /dev/null
        {check} raw >&2
        mount -o loop,ro raw m
        diff -r --no-dereference /usr/include/linux/netfilter m/first >&2
        umount m"#,
        dsec = env!("CARGO_BIN_EXE_dsec")
    );
    sh(world.root(), &script);
}

fn what_fio_wrote_is_read_back() {
    let (world, device) = attached("48MiB");
    let job = |name: &str, more: &str| {
        format!(
            "fio --name={name} --filename={device} --size=20m --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_dump=0              --ioengine=libaio --iodepth=16 --output-format=terse {more} > {name}.log 2>&1 || {{ cat {name}.log >&2; exit 1; }}
"
        )
    };
    let past = job(
        "past",
        "--direct=1 --rw=randwrite --bsrange=512-128k --bs_unaligned=0 --blockalign=512",
    );
    let cached = job(
        "cached",
        "--direct=0 --offset=24m --rw=randwrite --bsrange=4k-64k --fsync=32",
    );
    sh(world.root(), &(past + &cached));
    ok(dsec(&world, &["disk", "detach", "./d"]));
}

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
