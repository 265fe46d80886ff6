//! `dsec-bench sandbox`: what a sandbox costs, beside `unshare`, crun and runc on the same tree.
//!
//! Over HTTP as clients see it, through a real layerd: from the request to make one to the answer with the first command's
//! output, back to back and with pauses (a loop hides what the kernel's grace periods cost); round trips of commands; idle
//! memory; forks; packing.

mod daemon;
mod rivals;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use imgstore::ids::to_u64;
use serde_json::{Value, json};

use crate::command;
use crate::error::{Context, Error, Result};
use crate::rows::{Rows, as_f64, percentile_ms};
use crate::store::Binaries;
use daemon::{Client, Sandboxd};

/// What is run in each.
const HELLO: [&str; 2] = ["/bin/echo", "hello"];
/// The layer of the tree.
const BASE: &str = "base/bench:1";
/// Pause between starts that are not back to back.
const SPARSE: Duration = Duration::from_millis(60);
/// Threads that make sandboxes at a time for the rate.
const MAKERS: usize = 4;
/// Changed files that are packed.
const CHANGED: usize = 1000;

/// Measure sandboxes: creation, commands, memory, forks, packing; beside unshare, crun and runc.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  tools/setup bench && cargo build --release && target/release/dsec-bench sandbox\n\nNeeds root, Linux 6.15, and Debian's busybox-static, crun and runc (`tools/setup bench`)."
)]
pub(crate) struct SandboxArgs {
    /// Folder with `dsec`, `layerd` and `sandboxd` [default: where this program is].
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Folder for everything that is made.
    #[arg(long, value_name = "DIR", env = "TMPDIR", default_value = "/tmp")]
    tmp: PathBuf,
    /// A tenth of everything, for a quick look.
    #[arg(long)]
    small: bool,
    /// What to measure.
    #[arg(long, value_delimiter = ',', default_values_t = Part::ALL)]
    parts: Vec<Part>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Something that can be measured alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Create,
    Rivals,
    Rate,
    Exec,
    Idle,
    Fork,
    Pack,
}

impl Part {
    const ALL: [Self; 7] = [
        Self::Create,
        Self::Rivals,
        Self::Rate,
        Self::Exec,
        Self::Idle,
        Self::Fork,
        Self::Pack,
    ];
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Create => "create",
            Self::Rivals => "rivals",
            Self::Rate => "rate",
            Self::Exec => "exec",
            Self::Idle => "idle",
            Self::Fork => "fork",
            Self::Pack => "pack",
        };
        f.write_str(name)
    }
}

/// Whether one start follows the other at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    BackToBack,
    Sparse,
}

impl Pace {
    const ALL: [Self; 2] = [Self::BackToBack, Self::Sparse];

    fn wait(self) {
        if self == Self::Sparse {
            std::thread::sleep(SPARSE);
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::BackToBack => "back to back",
            Self::Sparse => "60 ms apart",
        }
    }
}

/// Measures and prints.
pub(crate) fn run(args: &SandboxArgs) -> Result<()> {
    let scale = if args.small { 10 } else { 1 };
    let binaries = Binaries::require(args.bin_dir.as_deref())?;
    let scratch = tempfile::Builder::new()
        .prefix("dsec-bench-sandbox-")
        .tempdir_in(&args.tmp)
        .on("make a folder in", &args.tmp)?;
    let folder = scratch.path();
    let tree = tree(folder)?;
    binaries.build(&tree, BASE, &folder.join("origin"))?;
    let daemon = Sandboxd::start(&binaries, &folder.join("origin"), folder)?;
    let mut client = daemon.client()?;
    let mut rows = Rows::default();
    for part in &args.parts {
        let (rows, client) = (&mut rows, &mut client);
        match part {
            Part::Create => create(rows, client, 300 / scale)?,
            Part::Rivals => beside(rows, folder, &tree, 100 / scale)?,
            Part::Rate => rate(rows, &daemon, 1200 / scale)?,
            Part::Exec => exec(rows, client, 3000 / scale)?,
            Part::Idle => idle(rows, &daemon, 500 / scale)?,
            Part::Fork => fork(rows, client, 100 / scale)?,
            Part::Pack => pack(rows, client, folder)?,
        }
    }
    rows.print(args.json)
}

/// The same tree, run by others.
fn beside(rows: &mut Rows, folder: &Path, tree: &Path, count: usize) -> Result<()> {
    rivals::bundle(&folder.join("bundle"), tree)?;
    for pace in Pace::ALL {
        for rival in &rivals::ALL {
            let times = rival.times(&folder.join("bundle"), count, pace)?;
            if let Some(times) = times {
                let what = format!("{}, {}", rival.name, pace.name());
                spread(rows, &what, times);
            }
        }
    }
    Ok(())
}

/// A small root: one static program under several names.
fn tree(folder: &Path) -> Result<PathBuf> {
    let tree = folder.join("tree");
    let line = r#"mkdir -p "$1"/{bin,proc,sys,dev,tmp,root,etc,w}
        cp "$(command -v busybox)" "$1/bin/busybox"
        for name in sh echo cat sleep true seq dd; do ln -s busybox "$1/bin/$name"; done
        echo root:x:0:0:root:/root:/bin/sh >"$1/etc/passwd""#;
    command::shell(line, &[tree.as_os_str()])?;
    Ok(tree)
}

fn spread(rows: &mut Rows, what: &str, mut times: Vec<Duration>) {
    for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
        rows.add(
            format!("{what}, {name}"),
            percentile_ms(&mut times, part),
            "ms",
        );
    }
}

fn create(rows: &mut Rows, client: &mut Client, count: usize) -> Result<()> {
    // The first one mounts the layer.
    let first = client.create(BASE)?;
    for pace in Pace::ALL {
        let (mut made, mut said, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            pace.wait();
            let began = Instant::now();
            let id = client.create(BASE)?;
            made.push(began.elapsed());
            let ran = client.exec(&id, &HELLO)?;
            said.push(began.elapsed());
            // "hello\n" in base64: what the time was measured for.
            if ran.get("stdout").and_then(Value::as_str) != Some("aGVsbG8K") {
                return Err(Error::Unexpected(format!("the command said {ran}")));
            }
            let ends = Instant::now();
            client.kill(&id)?;
            gone.push(ends.elapsed());
        }
        let pace = pace.name();
        spread(rows, &format!("sandboxd: create, {pace}"), made);
        spread(
            rows,
            &format!("sandboxd: create to first output, {pace}"),
            said,
        );
        spread(rows, &format!("sandboxd: kill, {pace}"), gone);
    }
    client.kill(&first)
}

/// Sandboxes made, used and killed a second, by some clients at a time.
fn rate(rows: &mut Rows, daemon: &Sandboxd, count: usize) -> Result<()> {
    let each = count / MAKERS;
    let work = |client: &mut Client| -> Result<()> {
        for _ in 0..each {
            let id = client.create(BASE)?;
            client.exec(&id, &HELLO)?;
            client.kill(&id)?;
        }
        Ok(())
    };
    let mut clients = (0..MAKERS)
        .map(|_| daemon.client())
        .collect::<Result<Vec<_>>>()?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let threads = clients
            .iter_mut()
            .map(|client| scope.spawn(|| work(client)));
        let threads: Vec<_> = threads.collect();
        let ended = threads.into_iter().map(|thread| {
            let panicked = |_| Error::Unexpected("a client's thread panicked".to_owned());
            thread.join().map_err(panicked)?
        });
        ended.collect::<Result<()>>()
    })?;
    let made = as_f64(to_u64(each * MAKERS));
    let what = format!("sandboxd: create, command, kill, {MAKERS} at a time");
    rows.add(what, made / began.elapsed().as_secs_f64(), "/s");
    Ok(())
}

fn exec(rows: &mut Rows, client: &mut Client, count: usize) -> Result<()> {
    let id = client.create(BASE)?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let began = Instant::now();
        client.exec(&id, &["/bin/true"])?;
        times.push(began.elapsed());
    }
    spread(rows, "sandboxd: a command", times);
    client.kill(&id)
}

fn idle(rows: &mut Rows, daemon: &Sandboxd, count: usize) -> Result<()> {
    let mut client = daemon.client()?;
    let before = daemon.pss_bytes()?;
    let ids = (0..count)
        .map(|_| client.create(BASE))
        .collect::<Result<Vec<_>>>()?;
    let all = daemon.pss_bytes()?;
    let mib = |bytes: u64| as_f64(bytes) / f64::from(1 << 20) / as_f64(to_u64(count));
    rows.add(
        format!("sandboxd: {count} idle, daemon and all, each"),
        mib(all),
        "MiB",
    );
    let more = all.saturating_sub(before);
    rows.add(
        format!("sandboxd: {count} idle, what each adds"),
        mib(more),
        "MiB",
    );
    for id in ids {
        client.kill(&id)?;
    }
    Ok(())
}

fn number(answer: &Value, field: &str) -> f64 {
    answer
        .get(field)
        .and_then(Value::as_f64)
        .unwrap_or(f64::NAN)
}

fn fork(rows: &mut Rows, client: &mut Client, count: usize) -> Result<()> {
    let id = client.create(BASE)?;
    client.exec(
        &id,
        &[
            "/bin/sh",
            "-c",
            "for n in $(seq 100); do echo $n > /w/$n; done",
        ],
    )?;
    let began = Instant::now();
    let asked = json!({"count": count});
    let forked = client.ask("POST", &format!("/v1/sandboxes/{id}/fork"), &asked)?;
    let took = began.elapsed().as_secs_f64() * 1e3;
    let (frozen, copied) = (number(&forked, "frozen_ms"), number(&forked, "copied_ms"));
    rows.add("fork: the parent's 100 files copied once", copied, "ms");
    rows.add("fork: the parent stood still", frozen, "ms");
    let each = (took - copied) / as_f64(to_u64(count));
    rows.add(format!("fork: each of {count} children"), each, "ms");
    let children = forked.get("children").and_then(Value::as_array);
    for child in children.into_iter().flatten() {
        let id = child.get("id").and_then(Value::as_str);
        client.kill(id.ok_or_else(|| Error::Unexpected(format!("a child failed: {child}")))?)?;
    }
    client.kill(&id)
}

fn pack(rows: &mut Rows, client: &mut Client, folder: &Path) -> Result<()> {
    let id = client.create(BASE)?;
    let line = format!(
        "for n in $(seq {CHANGED}); do dd if=/dev/urandom of=/w/$n bs=4096 count=2 2>/dev/null; done"
    );
    client.exec(&id, &["/bin/sh", "-c", &line])?;
    let before = stored(folder)?;
    let asked = json!({"name": "workspace/packed:1"});
    let began = Instant::now();
    let packed = client.ask("POST", &format!("/v1/sandboxes/{id}/pack_diff"), &asked)?;
    let took = began.elapsed().as_secs_f64() * 1e3;
    let frozen = number(&packed, "frozen_ms");
    rows.add(
        format!("pack_diff of {CHANGED} files of 8 KiB: in all"),
        took,
        "ms",
    );
    rows.add(
        format!("pack_diff of {CHANGED} files: the sandbox stood still"),
        frozen,
        "ms",
    );
    let changed = as_f64(to_u64(CHANGED * 8192));
    let ratio = as_f64(stored(folder)? - before) / changed;
    rows.add(
        "pack_diff: bytes on the origin to bytes changed",
        ratio,
        "x",
    );
    client.kill(&id)
}

/// Bytes of all packs of the origin: what data costs, without metadata.
fn stored(folder: &Path) -> Result<u64> {
    let line = r#"find "$1/origin/packs" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }'"#;
    let sum = command::shell(line, &[folder.as_os_str()])?;
    String::from_utf8_lossy(&sum)
        .trim()
        .parse()
        .during("adding the sizes of packs")
}
