//! Attached disks: strangers' NBD clients, the FUSE file, snapshots while in use, killed servers, two servers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::nbd_client::NbdClient;
use crate::world::{World, dsec, failed, json, noise, ok, sh};

/// A disk of one test; detached when the test ends, however it ends.
struct Disk<'a> {
    world: &'a World,
    name: &'static str,
}

impl<'a> Disk<'a> {
    fn create(world: &'a World, name: &'static str, more: &[&str]) -> Self {
        let start = ["disk", "create", name, "--disks", "disks"];
        ok(dsec(world, &[&start[..], more].concat()));
        Self { world, name }
    }

    fn run(&self, command: &str, more: &[&str]) -> std::process::Output {
        let start = ["disk", command, self.name, "--disks", "disks"];
        dsec(self.world, &[&start[..], more].concat())
    }

    fn ok(&self, command: &str, more: &[&str]) -> String {
        ok(self.run(command, more))
    }

    /// Attaches at a socket; the server's status.
    fn attach_nbd(&self) -> Value {
        json(&self.ok(
            "attach",
            &["--nbd", &format!("{}.sock", self.name), "--json"],
        ))
    }

    fn socket(&self) -> PathBuf {
        self.world.path(&format!("{}.sock", self.name))
    }

    fn folder(&self) -> PathBuf {
        self.world.path("disks").join(self.name)
    }

    /// Ends the server as a crash does.
    fn kill(&self, status: &Value) {
        let pid = Pid::from_raw(status["pid"].as_i64().unwrap().try_into().unwrap());
        kill(pid, Signal::SIGKILL).unwrap();
        // It is no child of the test; its lock tells when it is gone.
        let lock = self.folder().join("lock");
        sh(
            self.world.root(),
            &format!("flock '{}' true", lock.display()),
        );
    }

    fn export(&self, to: &str) {
        self.ok("export", &["--to", to]);
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        // Most tests have detached it already.
        drop(self.run("detach", &["--force"]));
    }
}

/// Red when a flush is not answered, a trim gives old bytes, or sizes are told wrong.
#[test]
fn strangers_use_the_socket() {
    let world = World::new();
    let disk = Disk::create(&world, "vm", &["--size", "64MiB"]);
    let status = disk.attach_nbd();
    assert_eq!(status["path"].as_str(), disk.socket().to_str());
    std::fs::write(world.path("in.raw"), noise(3, 64 << 20)).unwrap();
    let uri = format!("nbd+unix:///?socket={}", disk.socket().display());
    let info = json(&sh(world.root(), &format!("nbdinfo --json '{uri}'")));
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], 64 << 20);
    for can in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_multi_conn",
    ] {
        assert_eq!(export[can], true, "{can}: {export}");
    }
    assert_eq!(export["is_read_only"], false);
    let listed = sh(world.root(), &format!("nbdinfo --list '{uri}'"));
    assert!(listed.contains("export=\"vm\""), "{listed}");
    let named = format!("nbd+unix:///vm?socket={}", disk.socket().display());
    sh(
        world.root(),
        &format!(
            "nbdcopy --flush in.raw '{named}'; nbdcopy '{uri}' out.raw; cmp in.raw out.raw
            qemu-img compare -f raw -F raw in.raw '{uri}'
            qemu-io -f raw -c 'write -P 0x5a 1M 64k' -c 'write -f -P 0x5b 1048577 3' -c 'discard 2M 1M' -c 'write -z 4M 64k' -c flush '{uri}'
            qemu-io -f raw -c 'read -P 0x5b 1048577 3' -c 'read -P 0x5a 1048580 512' -c 'read -P 0 2M 1M' -c 'read -P 0 4M 64k' '{uri}'
            nbdcopy '{uri}' after.raw"
        ),
    );
    let missing = format!("nbd+unix:///other?socket={}", disk.socket().display());
    let refused = Command::new("qemu-img")
        .args(["info", &missing])
        .output()
        .unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("there is one export here, `vm`"), "{said}");
    disk.ok("detach", &[]);
    assert!(!disk.socket().exists());
    disk.export("exported.raw");
    sh(world.root(), "cmp after.raw exported.raw");
}

#[test]
fn a_file_system_lives_in_the_fuse_file() {
    let world = World::new();
    let disk = Disk::create(&world, "fs", &["--size", "96MiB"]);
    let printed = disk.ok("attach", &["--file", "disk.img"]);
    assert_eq!(Path::new(printed.trim()), world.path("disk.img"));
    sh(
        world.root(),
        "mkdir tree; seq 1 200000 > tree/numbers; cp -r /etc/ssl tree/ 2>/dev/null || true
        mkfs.ext4 -q -F -d tree disk.img; e2fsck -fn disk.img >&2
        head -c 3000000 /dev/urandom > random
        dd if=random of=disk.img bs=4096 seek=20000 conv=notrunc,fsync status=none
        dd if=random of=copy bs=1 count=0 status=none
        dd if=disk.img bs=4096 skip=20000 count=3000000 iflag=count_bytes status=none | cmp - random
        printf abc | dd of=disk.img bs=1 seek=90000001 conv=notrunc status=none
        [ \"$(dd if=disk.img bs=1 skip=90000001 count=3 status=none)\" = abc ]
        fallocate --punch-hole --offset 81920000 --length 1000001 disk.img
        dd if=disk.img bs=1000001 skip=81920000 count=1 iflag=skip_bytes,fullblock status=none | cmp -n 1000001 - /dev/zero
        dd if=disk.img bs=4096 skip=82920001 count=1000 iflag=skip_bytes,count_bytes status=none > got
        dd if=random bs=4096 skip=1000001 count=1000 iflag=skip_bytes,count_bytes status=none | cmp - got
        fallocate --zero-range --keep-size --offset 82920001 --length 500 disk.img
        dd if=disk.img bs=500 skip=82920001 count=1 iflag=skip_bytes status=none | cmp -n 500 - /dev/zero
        ! truncate -s 1M disk.img 2>/dev/null; [ $(stat -c %s disk.img) = 100663296 ]
        cp disk.img before.raw",
    );
    let open = std::fs::File::open(world.path("disk.img")).unwrap();
    let error = failed(&disk.run("detach", &[]), 1);
    assert!(error.contains("is in use"), "{error}");
    drop(open);
    disk.ok("snapshot", &[]);
    sh(
        world.root(),
        "printf xyz | dd of=disk.img bs=1 seek=90000001 conv=notrunc,fsync status=none",
    );
    disk.ok("detach", &[]);
    assert_eq!(std::fs::metadata(world.path("disk.img")).unwrap().len(), 0);
    disk.export("after.raw");
    sh(
        world.root(),
        "e2fsck -fn after.raw >&2; cmp after.raw before.raw > differ || true",
    );
    sh(
        world.root(),
        "printf abc | dd of=after.raw bs=1 seek=90000001 conv=notrunc status=none; cmp after.raw before.raw",
    );
}

#[test]
fn one_server_a_disk_and_clear_words() {
    let world = World::new();
    let disk = Disk::create(&world, "d", &["--size", "1MiB"]);
    let error = failed(&disk.run("attach", &["--file", "disks/d/disk.json"]), 1);
    assert!(error.contains("would hide what is there"), "{error}");
    let error = failed(&disk.run("detach", &[]), 1);
    assert!(error.contains("is not attached"), "{error}");
    let status = disk.attach_nbd();
    let error = failed(&disk.run("attach", &["--nbd", "other.sock"]), 1);
    assert!(error.contains("open in another process"), "{error}");
    assert!(!world.path("other.sock").exists());
    let error = failed(&disk.run("export", &["--to", "x.raw"]), 1);
    assert!(error.contains("open in another process"), "{error}");
    let other = Disk::create(&world, "e", &["--size", "1MiB"]);
    let error = failed(&other.run("attach", &["--nbd", "d.sock"]), 1);
    assert!(error.contains("somebody listens"), "{error}");
    let listed = json(&ok(dsec(
        &world,
        &["disk", "ls", "--disks", "disks", "--json"],
    )));
    assert_eq!(listed[0]["attached"]["pid"], status["pid"]);
    assert_eq!(listed[1]["attached"], Value::Null);

    // A client that holds the disk keeps it from going away, unless it is forced.
    let mut client = NbdClient::connect(&disk.socket());
    client.write(0, &[7; 512]).unwrap();
    let error = failed(&disk.run("detach", &[]), 1);
    assert!(error.contains("1 clients"), "{error}");
    assert_eq!(client.read(0, 512).unwrap(), [7; 512]);
    disk.ok("detach", &["--force"]);
    client.read(0, 512).unwrap_err();
    // It was not flushed by its client; a detach does that.
    disk.attach_nbd();
    assert_eq!(
        NbdClient::connect(&disk.socket()).read(0, 512).unwrap(),
        [7; 512]
    );
}

/// Requests that make no sense get an error each, or end the connection, and the next client finds the disk as it was.
#[test]
fn a_hostile_client_ends_its_own_connection_only() {
    use disk_server::nbd::wire::{CMD_READ, CMD_WRITE};
    use std::io::{Read as _, Write as _};
    let world = World::new();
    let disk = Disk::create(&world, "d", &["--size", "1MiB"]);
    disk.attach_nbd();
    let mut client = NbdClient::connect(&disk.socket());
    assert_eq!(client.size, 1 << 20);
    assert_eq!(
        client.ask(CMD_READ, 1 << 20, 1, &[]),
        Err("NBD error 22".into())
    );
    assert_eq!(
        client.ask(CMD_READ, u64::MAX, 512, &[]),
        Err("NBD error 22".into())
    );
    assert_eq!(
        client.ask(CMD_READ, 0, 64 << 20, &[]),
        Err("NBD error 22".into())
    );
    assert_eq!(
        client.ask(CMD_WRITE, (1 << 20) - 1, 2, &[1, 2]),
        Err("NBD error 28".into())
    );
    assert_eq!(client.ask(77, 0, 0, &[]), Err("NBD error 22".into()));
    assert_eq!(client.read((1 << 20) - 3, 3).unwrap(), [0; 3]);
    // More than a message may hold: the connection ends.
    client.ask(CMD_WRITE, 0, 64 << 20, &[0; 9]).unwrap_err();
    for nonsense in [
        &[0xFF; 300][..],
        b"GET / HTTP/1.1\r\n\r\n",
        &[0, 0, 0, 3, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9],
    ] {
        let mut stream = std::os::unix::net::UnixStream::connect(disk.socket()).unwrap();
        stream.write_all(nonsense).unwrap();
        let mut said = Vec::new();
        // An end, or a reset: the server does not read on.
        drop(stream.read_to_end(&mut said));
        assert!(said.len() <= 64, "{said:?}");
    }
    // A client that says nothing more does not keep the disk from being detached by force.
    let silent = std::os::unix::net::UnixStream::connect(disk.socket()).unwrap();
    let mut last = NbdClient::connect(&disk.socket());
    last.write(512, &[9; 512]).unwrap();
    disk.ok("detach", &["--force"]);
    drop(silent);
    let log = std::fs::read_to_string(disk.folder().join("server.log")).unwrap();
    assert!(
        log.contains("client flags") && log.contains("option magic"),
        "{log}"
    );
    assert!(
        log.contains("length of a write") && !log.contains("panicked"),
        "{log}"
    );
}

/// A write's bytes: its number and place in every 512.
fn content(number: u64, lba: u64) -> Vec<u8> {
    [number.to_le_bytes(), lba.to_le_bytes()]
        .concat()
        .repeat(32)
}

/// SIGKILL at any moment, over and over, under two writers that flush and a snapshot now and then: whatever was answered, flushed or
/// not, is there, every other sector is old or new as a whole. `DSEC_KILLS` says how often (`tools/soak`).
///
/// Red when a flush is answered before the index is written, and without the side files of what is not flushed. (What a loss of
/// power leaves is another question: it is tested in `imgstore`, and in the VM.)
#[test]
#[expect(clippy::too_many_lines, reason = "one story")]
fn what_was_answered_survives_kills() {
    const SECTORS: u64 = 512;
    let kills = std::env::var("DSEC_KILLS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(15_u64);
    let world = World::new();
    let disk = Disk::create(&world, "vm", &["--size", "1MiB"]);
    // Of each sector: the last number that was answered, the last that was sent.
    let answered: Vec<AtomicU64> = (0..SECTORS).map(|_| AtomicU64::new(0)).collect();
    let sent: Vec<AtomicU64> = (0..SECTORS).map(|_| AtomicU64::new(0)).collect();
    let number = AtomicU64::new(0);
    for round in 0..kills {
        let status = disk.attach_nbd();
        let mut check = NbdClient::connect(&disk.socket());
        let found = check
            .read(0, usize::try_from(SECTORS * 512).unwrap())
            .unwrap();
        for (lba, sector) in (0..SECTORS).zip(found.chunks(512)) {
            let at = usize::try_from(lba).unwrap();
            let (least, most) = (
                answered[at].load(Ordering::SeqCst),
                sent[at].load(Ordering::SeqCst),
            );
            let shown = u64::from_le_bytes(sector[..8].try_into().unwrap());
            assert!(
                shown >= least && shown <= most,
                "round {round}, sector {lba}: {least} <= {shown} <= {most}"
            );
            let whole = if shown == 0 {
                vec![0; 512]
            } else {
                content(shown, lba)
            };
            assert!(sector == whole, "round {round}, sector {lba} is torn");
            // It may have been sent and not answered.
            answered[at].store(shown, Ordering::SeqCst);
            sent[at].store(shown, Ordering::SeqCst);
        }
        drop(check);
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for half in 0..2 {
                let (answered, sent, number, killed) = (&answered, &sent, &number, &killed);
                let mut client = NbdClient::connect(&disk.socket());
                scope.spawn(move || {
                    let mut state = round * 2 + half + 1;
                    while !killed.load(Ordering::SeqCst) {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1);
                        let lba = half * (SECTORS / 2) + (state >> 33) % (SECTORS / 2 - 4);
                        let n = number.fetch_add(1, Ordering::SeqCst) + 1;
                        let count = 1 + (state >> 20) % 4;
                        let bytes: Vec<u8> =
                            (lba..lba + count).flat_map(|lba| content(n, lba)).collect();
                        for lba in lba..lba + count {
                            sent[usize::try_from(lba).unwrap()].store(n, Ordering::SeqCst);
                        }
                        if client.write(lba * 512, &bytes).is_err() {
                            return;
                        }
                        for lba in lba..lba + count {
                            answered[usize::try_from(lba).unwrap()].store(n, Ordering::SeqCst);
                        }
                        if (state >> 40).is_multiple_of(5) && client.flush().is_err() {
                            return;
                        }
                    }
                });
            }
            let begun = number.load(Ordering::SeqCst);
            let wanted = begun + 20 + round * 37 % 200;
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            let mut snapped = false;
            while number.load(Ordering::SeqCst) < wanted {
                assert!(
                    std::time::Instant::now() < deadline,
                    "the writers do not go on"
                );
                if round % 3 == 1 && !snapped {
                    snapped = true;
                    disk.ok("snapshot", &[]);
                }
                std::thread::yield_now();
            }
            disk.kill(&status);
            killed.store(true, Ordering::SeqCst);
        });
    }
    assert!(number.load(Ordering::SeqCst) > kills * 20);
    assert!(answered.iter().any(|n| n.load(Ordering::SeqCst) > 0));
}

#[test]
fn a_killed_servers_file_is_attached_again_where_it_was() {
    let world = World::new();
    let disk = Disk::create(&world, "d", &["--size", "4MiB"]);
    let status = json(&disk.ok("attach", &["--file", "a.img", "--json"]));
    sh(
        world.root(),
        "printf kept | dd of=a.img bs=1 seek=12345 conv=notrunc,fsync status=none",
    );
    disk.kill(&status);
    // Readers get errors, not zeros.
    assert!(std::fs::read(world.path("a.img")).is_err());
    let again = json(&disk.ok("attach", &["--json"]));
    assert_eq!(again["path"], status["path"]);
    assert_ne!(again["pid"], status["pid"]);
    let found = sh(
        world.root(),
        "dd if=a.img bs=1 skip=12345 count=4 status=none",
    );
    assert_eq!(found, "kept");
    disk.ok("detach", &[]);
    let error = failed(&disk.run("attach", &[]), 1);
    assert!(
        error.contains("--file PATH"),
        "nothing is remembered after a detach: {error}"
    );
}

/// Snapshots, children, merge, restack and commit of a disk that is being written.
#[test]
fn a_chain_grows_branches_and_shrinks_while_in_use() {
    let world = World::new();
    let disk = Disk::create(&world, "vm", &["--size", "8MiB"]);
    disk.attach_nbd();
    let mut client = NbdClient::connect(&disk.socket());
    let mut model = vec![0; 8 << 20];
    let mut layers = Vec::new();
    for round in 0..6_u64 {
        let bytes = noise(round + 1, 300_000 - usize::try_from(round).unwrap());
        let at = usize::try_from(round).unwrap() * 100_001;
        client.write(u64::try_from(at).unwrap(), &bytes).unwrap();
        model[at..at + bytes.len()].copy_from_slice(&bytes);
        client
            .trim(u64::try_from(at).unwrap() + 512, 70_000)
            .unwrap();
        model[at + 512..at + 70_512].fill(0);
        layers.push(disk.ok("snapshot", &[]).trim().to_owned());
        std::fs::write(world.path(&format!("model-{round}")), &model).unwrap();
    }
    client.write(0, &[1; 4096]).unwrap();
    model[..4096].fill(1);
    std::fs::write(world.path("model"), &model).unwrap();
    // Children of the third snapshot share three layers and differ above.
    let from: Vec<&str> = layers[..3].iter().flat_map(|l| ["--from", l]).collect();
    // One that lies in a disk's folder brings what lies below it. Red when it is taken alone: it has only what was written last.
    let third = ["--from", &layers[2]];
    for (name, from) in [("child-a", &from[..]), ("child-b", &third)] {
        let child = Disk::create(&world, name, from);
        child.attach_nbd();
        let mut writer = NbdClient::connect(&child.socket());
        writer.write(4096, name.as_bytes()).unwrap();
        drop(writer);
        child.ok("detach", &["--force"]);
        child.export("child.raw");
        let mut expected = std::fs::read(world.path("model-2")).unwrap();
        expected[4096..4096 + name.len()].copy_from_slice(name.as_bytes());
        assert!(
            std::fs::read(world.path("child.raw")).unwrap() == expected,
            "{name}"
        );
    }
    // Merged files are equal, so a child can lie on them; other files are refused.
    let child = Disk::create(&world, "child-c", &from);
    let merge = [
        "disk",
        "merge",
        &layers[0],
        &layers[1],
        &layers[2],
        "--to",
        "merged.lsmt",
    ];
    ok(dsec(&world, &merge));
    child.ok("restack", &["--lower", "merged.lsmt"]);
    let state = json(&child.ok("inspect", &["--json"]));
    assert_eq!(state["disk"]["layers"].as_array().unwrap().len(), 1);
    child.export("child.raw");
    sh(world.root(), "cmp child.raw model-2");
    let merge = ["disk", "merge", &layers[0], &layers[1], "--to", "less.lsmt"];
    ok(dsec(&world, &merge));
    let error = failed(&child.run("restack", &["--lower", "less.lsmt"]), 1);
    assert!(error.contains("differ in the sector at byte"), "{error}");
    // The disk itself is merged under its client, and committed in three forms.
    disk.ok("merge", &[]);
    assert!(client.read(0, 8 << 20).unwrap() == model);
    disk.ok("commit", &["--to", "all.lsmt"]);
    disk.ok("commit", &["--to", "all.zfile", "--zfile", "lz4"]);
    let error = failed(&disk.run("commit", &["--to", "all.lsmt"]), 1);
    assert!(error.contains("all.lsmt"), "{error}");
    for file in ["all.lsmt", "all.zfile"] {
        ok(dsec(&world, &["disk", "export", file, "--to", "all.raw"]));
        sh(world.root(), "cmp all.raw model");
    }
    drop(client);
    disk.ok("detach", &["--force"]);
    disk.export("all.raw");
    sh(world.root(), "cmp all.raw model");
}
