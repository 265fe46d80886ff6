//! What sandboxes change as layers: long chains against a model, and no trace of what was deleted.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::sandboxd::{Sandboxd, base};
use crate::world::{World, noise};

/// Programs of the changes, and of the look at them.
const PROGRAMS: &str = "cat rm mkdir mv ln chmod chown cp truncate dd find sort setfattr getfattr mkfifo sha256sum head wc";

/// Everything of a tree but its times; names of one inode in a line.
const SHOW: &str = r#"find . -printf '%P|%y|%m|%U:%G|%l\n' | sort; find . ! -type d -printf '%P %s\n' | sort
find . -type f -exec sha256sum {} + | sort -k 2; getfattr -hd -m '^user' $(find . | sort)
declare -A names; while read -r inode name; do names[$inode]+=" $name"; done <<< "$(find . -type f -printf '%D:%i %P\n' | sort -k 2)"
for inode in "${!names[@]}"; do echo "same:${names[$inode]}"; done | sort"#;

/// What a change means on an overlay: a file of a lower layer gets an inode of its own, a folder of one is copied to be moved.
const MODEL: &str = r#"old() { grep -qx "$(stat -c %i "$1")" ../old; }
up() { if [ -f "$1" ] && ! [ -L "$1" ] && old "$1"; then cp -a "$1" ../new && mv -fT ../new "$1"; fi; }
mvd() { if old "$1"; then cp -aT "$1" "$2" && rm -r "$1"; else mv -T "$1" "$2"; fi; }
"#;
const OVERLAY: &str = "up() { :; }\nmvd() { mv -T \"$1\" \"$2\"; }\n";

struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % most
    }

    /// One of few, so that files become folders and links, and the other way round.
    fn path(&mut self) -> String {
        let depth = 1 + self.below(3);
        let names = (0..depth).map(|_| ["a", "b", "c", "d"].get(self.below(4)).copied().unwrap());
        names.collect::<Vec<_>>().join("/")
    }

    /// A line of shell.
    fn change(&mut self, n: usize) -> String {
        let (p, q, some) = (self.path(), self.path(), self.below(1000));
        let file = format!("[ -f {p} ] && ! [ -L {p} ]");
        let writable = format!("{{ {file} || ! [ -e {p} -o -L {p} ]; }}");
        let free = format!("! [ -e {q} -o -L {q} ]");
        let folder = q.rsplit_once('/').map_or(".", |(folder, _)| folder);
        match self.below(16) {
            0 | 1 => format!("{writable} && {{ up {p}; echo {n} > {p}; }}"),
            2 => format!("{writable} && {{ up {p}; echo {n} >> {p}; }}"),
            3 | 4 => format!("mkdir -p {p}"),
            5 => format!("rm -rf {p}"),
            6 => format!(
                "{file} && ! [ -d {q} ] && ! [ {p} -ef {q} ] && {{ up {p}; mv -fT {p} {q}; }}"
            ),
            7 => format!(
                "[ -d {p} ] && ! [ -L {p} ] && {free} && in=$(cd -P {folder} && pwd) && of=$(cd -P {p} && pwd) && case $in/ in $of/*) ;; *) mvd {p} {q};; esac"
            ),
            8 => format!("{file} && {free} && [ -d {folder} ] && {{ up {p}; ln {p} {q}; }}"),
            9 => format!("{free} && ln -s {p} {q}"),
            10 => format!(
                "! [ -L {p} ] && {{ up {p}; chmod {:o} {p}; }}",
                0o600 + some % 0o200
            ),
            11 => format!(
                "! [ -L {p} ] && {{ up {p}; chown {some}:{} {p}; }}",
                some / 2
            ),
            12 => format!(
                "[ -f {p} -o -d {p} ] && ! [ -L {p} ] && {{ up {p}; setfattr -n user.k{} -v {n} {p}; }}",
                some % 3
            ),
            13 => format!("{free} && mkfifo {q}"),
            14 => format!("{writable} && {{ up {p}; truncate -s {}K {p}; }}", some * 3),
            _ => format!(
                "{writable} && {{ up {p}; printf {n} | dd of={p} bs=1 seek={} conv=notrunc; }}",
                some * 1009
            ),
        }
    }

    fn changes(&mut self, count: usize, n: &mut usize) -> String {
        let lines = (0..count).map(|_| {
            *n += 1;
            // What fails, fails in both.
            format!("{{ {}; }} 2> /dev/null || :\n", self.change(*n))
        });
        lines.collect()
    }
}

fn bash(folder: &Path, script: &str) -> String {
    let ran = Command::new("bash")
        .args(["-c", script])
        .env("LC_ALL", "C")
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{script}: {ran:?}");
    String::from_utf8(ran.stdout).unwrap()
}

/// A chain of 50 layers, each packed on top of all before it, some of forks and of forks of forks, against the same changes of a plain
/// folder. `DSEC_SEED` chooses others. Mutations: without the join of generations, packs of forks lack what their ancestors did;
/// if a folder over a whiteout is not opaque, what had been removed is there again.
#[test]
fn a_chain_of_fifty_layers_and_forks_is_what_a_plain_folder_would_be() {
    let seed = std::env::var("DSEC_SEED").map_or(0x00d5_ec00, |seed| seed.parse().unwrap());
    let (mut random, mut n) = (Random(seed), 0);
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    base(&world, "rich", PROGRAMS);
    // A memory file system never uses an inode's number twice.
    let model = tempfile::tempdir_in("/dev/shm").unwrap();
    let folder = model.path().join("w");
    fs::create_dir(&folder).unwrap();
    let mut chain: Vec<String> = Vec::new();
    let create = |chain: &[String]| {
        let mut args = vec!["sandbox", "create", "--base", "base/rich:1"];
        for layer in chain {
            args.extend(["--toolkit", layer]);
        }
        daemon.ok(&args)
    };
    let inside = |id: &str, script: &str| {
        let script = format!("cd /w; export LC_ALL=C; {script}");
        daemon.ok(&["sandbox", "exec", id, "--", "bash", "-c", &script])
    };
    let same = |id: &str, what: &str| {
        let (theirs, ours) = (bash(&folder, SHOW), inside(id, SHOW));
        assert!(
            theirs.trim_end() == ours,
            "{what}, seed {seed}:\n{theirs}\n{ours}"
        );
    };
    let mut id = create(&chain);
    let mut forks = 0;
    while chain.len() < 50 {
        bash(&folder, "find . -printf '%i\\n' > ../old");
        let changes = random.changes(12, &mut n);
        bash(&folder, &format!("{MODEL}{changes}"));
        inside(&id, &format!("{OVERLAY}{changes}"));
        let before = id.clone();
        if random.below(2) == 0 {
            forks += 1;
            id = daemon.ok(&["sandbox", "fork", &before]);
            same(&id, &format!("fork {forks}, on {} layers", chain.len()));
        } else {
            chain.push(format!("workspace/step:{}", chain.len()));
            let layer = &chain[chain.len() - 1];
            daemon.ok(&["sandbox", "pack-diff", &before, layer]);
            id = create(&chain);
            same(&id, &format!("layer {}, after {forks} forks", chain.len()));
        }
        daemon.ok(&["sandbox", "kill", &before]);
    }
    println!("{n} changes, {forks} forks, {} layers", chain.len());
    assert!(forks > 10, "{forks}");
}

/// Whether some file below a folder has these bytes.
fn holds(folder: &Path, needle: &[u8]) -> bool {
    fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return holds(&path, needle);
        }
        let bytes = fs::read(&path).unwrap();
        bytes.windows(needle.len()).any(|window| window == needle)
    })
}

/// Noise does not compress: it lies in a layer as it is. Mutation: without the scrub, its file is found; if the join copies all
/// generations over each other and drops nothing, what the child deleted is.
#[test]
fn what_was_deleted_or_left_out_leaves_no_trace_in_a_layer() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    let secrets = ["kept", "deleted", "left-out", "cut", "below", "child"];
    let put = |id: &str, n: usize| {
        fs::write(world.path("in"), noise(n as u64 + 1, 150_000)).unwrap();
        daemon.ok(&["sandbox", "cp", "in", &format!("{id}:/w/{}", secrets[n])]);
    };
    for n in 0..5 {
        put(&id, n);
    }
    let run = |id: &str, line: &str| daemon.ok(&["sandbox", "exec", id, "--", "sh", "-c", line]);
    run(
        &id,
        "rm /w/deleted; head -c 4096 /w/kept > /w/other; cat /w/other > /w/cut",
    );
    daemon.ok(&[
        "sandbox",
        "pack-diff",
        &id,
        "workspace/one:1",
        "--scrub",
        "/w/left-out",
    ]);
    let found = |n: usize| {
        let needle = &noise(n as u64 + 1, 150_000)[100_000..100_032];
        let folder = world.path("origin");
        holds(&folder, needle)
    };
    assert_eq!(
        [0, 1, 2, 3, 4].map(found),
        [true, false, false, false, true]
    );
    // A child that deletes what its parent had, on an origin that has none of it.
    let other = World::new();
    let daemon = Sandboxd::start(&other);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    for n in [0, 1, 4] {
        fs::write(other.path("in"), noise(n as u64 + 1, 150_000)).unwrap();
        daemon.ok(&["sandbox", "cp", "in", &format!("{id}:/w/{}", secrets[n])]);
    }
    let child = daemon.ok(&["sandbox", "fork", &id]);
    let line = "rm /w/below; echo over > /w/deleted";
    daemon.ok(&["sandbox", "exec", &child, "--", "sh", "-c", line]);
    daemon.ok(&["sandbox", "pack-diff", &child, "workspace/two:1"]);
    let found = |n: usize| {
        let needle = &noise(n as u64 + 1, 150_000)[100_000..100_032];
        holds(&other.path("origin"), needle)
    };
    assert_eq!([0, 1, 4].map(found), [true, false, false]);
    // Nothing of it waits on the host either.
    let left = fs::read_dir(other.path("state/packing")).unwrap().count();
    assert_eq!(left, 0);
}

/// Mutations: steps that are not looked at in `remove_unused_frozen` are gone at the fork; a record without them loses them in a crash.
#[test]
fn children_of_earlier_steps_have_the_files_of_then() {
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    let write = |daemon: &Sandboxd<'_>, id: &str, what: &str| {
        let line = format!("echo {what} > /w/f");
        daemon.ok(&["sandbox", "exec", id, "--", "sh", "-c", &line]);
    };
    let read =
        |daemon: &Sandboxd<'_>, id: &str| daemon.ok(&["sandbox", "exec", id, "--", "cat", "/w/f"]);
    write(&daemon, &id, "one");
    daemon.ok(&["sandbox", "snapshot", &id, "first"]);
    write(&daemon, &id, "two");
    let digest = daemon.ok(&["sandbox", "pack-diff", &id, "workspace/w:2"]);
    write(&daemon, &id, "three");
    daemon.crash_and_restart();
    let listed = daemon.ok(&["sandbox", "steps", &id]);
    assert_eq!(listed, format!("first  snapshot\nworkspace/w:2  {digest}"));
    let of_first = daemon.ok(&["sandbox", "fork", &id, "--from", "first"]);
    let of_layer = daemon.ok(&["sandbox", "fork", &id, "--from", "workspace/w:2"]);
    assert_eq!(
        (&*read(&daemon, &of_first), &*read(&daemon, &of_layer)),
        ("one", "two")
    );
    // Grandchildren: of a step of a child that has ancestors.
    write(&daemon, &of_first, "child");
    daemon.ok(&["sandbox", "snapshot", &of_first, "mine"]);
    let packed = daemon.ok(&["sandbox", "pack-diff", &of_first, "workspace/w:3"]);
    write(&daemon, &of_first, "later");
    for step in ["mine", "workspace/w:3"] {
        let kid = daemon.ok(&["sandbox", "fork", &of_first, "--from", step]);
        assert_eq!(read(&daemon, &kid), "child", "{step}");
    }
    assert_ne!(packed, digest);
    // What a child stands on outlives the step and its sandbox.
    daemon.ok(&["sandbox", "steps", &id, "--forget", "first"]);
    daemon.ok(&["sandbox", "steps", &id, "--forget", "workspace/w:2"]);
    assert_eq!(daemon.ok(&["sandbox", "steps", &id]), "");
    daemon.ok(&["sandbox", "kill", &id]);
    assert_eq!(read(&daemon, &of_first), "later");
    let none = daemon.dsec(&["sandbox", "fork", &of_first, "--from", "none"]);
    assert_eq!(
        String::from_utf8(none.stderr).unwrap(),
        format!(
            "dsec: sandbox `{of_first}` has no snapshot or layer `none`: it has `mine`, `workspace/w:3` (not_found)\n"
        )
    );
}
