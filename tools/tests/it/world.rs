//! A folder of one test, `dsec` run in it, and trees to build from.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A folder that goes away with the value.
#[derive(Debug)]
pub(crate) struct World {
    dir: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // A web server that is not root must reach the origin in it.
        sh(dir.path(), "chmod 755 .");
        Self { dir }
    }

    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A folder, made if it is missing.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        fs::create_dir_all(self.path(name)).unwrap();
        self.path(name)
    }

    /// The address of the directory origin `name`.
    pub(crate) fn origin(&self, name: &str) -> String {
        format!("dir:{}", self.path(name).display())
    }

    /// `dsec build SOURCE --axis base --name t` with more arguments; the report.
    pub(crate) fn build(&self, source: &str, origin: &str, more: &[&str]) -> Value {
        let origin = self.origin(origin);
        let mut args = vec!["build", source, "--axis", "base", "--name", "t", "--json"];
        args.extend(["--origin", &origin]);
        if !more.contains(&"--version") {
            args.extend(["--version", "1"]);
        }
        args.extend(more);
        json(&ok(dsec(self, &args)))
    }
}

/// Runs `dsec` in the world's folder, with pipes.
pub(crate) fn dsec(world: &World, args: &[&str]) -> Output {
    dsec_reading(world, args, Stdio::null())
}

/// Runs `dsec` with these environment variables.
pub(crate) fn dsec_with(world: &World, env: &[(&str, &str)], args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dsec"))
        .args(args)
        .current_dir(world.root())
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Runs `dsec` with this standard input.
pub(crate) fn dsec_reading(world: &World, args: &[&str], input: impl Into<Stdio>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dsec"))
        .args(args)
        .current_dir(world.root())
        .env_remove("DSEC_LOG")
        .env_remove("DSEC_SOCKET")
        .stdin(input)
        .output()
        .unwrap()
}

/// Standard output of a run that succeeded and said nothing else.
pub(crate) fn ok(output: Output) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{error}");
    assert_eq!(error, "", "nothing but the result in a pipe");
    String::from_utf8(output.stdout).unwrap()
}

/// Standard error of a run that ended with this status.
pub(crate) fn failed(output: &Output, status: i32) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(status), "{said}{error}");
    error
}

pub(crate) fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Runs a shell script in a folder; it must succeed. Gives its output.
pub(crate) fn sh(dir: &Path, script: &str) -> String {
    let output = Command::new("sh")
        .args(["-euc", script])
        .current_dir(dir)
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Bytes that do not compress; the same for the same seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        out.extend(state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    out.truncate(len);
    out
}

/// A tree with everything that a tar can hold as well.
pub(crate) fn rich_tree(world: &World, name: &str) -> PathBuf {
    let tree = world.folder(name);
    fs::create_dir_all(tree.join("usr/lib/deep")).unwrap();
    fs::write(tree.join("usr/lib/large.so.1"), noise(1, 1_500_000)).unwrap();
    fs::write(tree.join("usr/lib/deep/small"), "a few words\n".repeat(9)).unwrap();
    fs::write(tree.join("usr/tool"), noise(2, 70_001)).unwrap();
    let holes = File::create(tree.join("usr/holes")).unwrap();
    holes.set_len(6 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, &noise(3, 9000), 3 << 20).unwrap();
    drop(holes);
    sh(
        &tree,
        "long=$(printf '%0200d' 7)
        : > empty; ln usr/tool usr/lib/tool; ln -s ../usr/tool usr/lib/link; ln -s $long/$long/$long long-link
        echo x > usr/$long; mkfifo usr/pipe; mknod usr/tty c 5 1; mknod usr/disk b 259 7
        chown 70000:4000000000 usr/lib/deep/small; chown -h 12:34 usr/lib/link
        chmod 4755 usr/tool; chmod 1777 usr/lib; chmod 0 empty
        setfattr -n user.binary -v 0x00ff0a00 usr/lib/deep/small
        setfattr -n trusted.note -v 0x41 usr/lib
        setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 usr/lib/large.so.1
        setfacl -m u:1234:r,g:77:rwx usr/lib/large.so.1; setfacl -d -m g:77:rx usr/lib/deep
        touch -d '1955-11-05 06:15:00.123456789 UTC' usr/lib/deep/small
        touch -d '2242-05-06 07:08:09.000000001 UTC' usr/tool
        touch -h -d '2001-02-03 04:05:06.7 UTC' usr/lib/link long-link
        touch -d '2020-01-01 00:00:00.5 UTC' usr/lib/deep usr/lib usr .",
    );
    tree
}

/// The two trees are equal to `diff`, names, types, contents.
pub(crate) fn same_contents(a: &Path, b: &Path) {
    let (a, b) = (a.display(), b.display());
    sh(
        Path::new("/"),
        &format!("diff -r --no-dereference '{a}' '{b}' >&2"),
    );
}
