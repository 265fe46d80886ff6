//! The layer store under test: its binaries, its origin on disk, and a `layerd` for one run.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::command;
use crate::corpus;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::say::progress;
use crate::workdir::WorkDir;

/// How long `layerd` may take to listen, and to end.
const LAYERD_WAIT_MAX: Duration = Duration::from_secs(20);
/// How often its socket is looked for.
const LAYERD_POLL: Duration = Duration::from_millis(2);

/// Where `dsec` and `layerd` are.
#[derive(Debug, Clone)]
pub(crate) struct Binaries {
    pub(crate) dsec: PathBuf,
    pub(crate) layerd: PathBuf,
}

impl Binaries {
    /// Those in `folder`, or beside the running program; `None` where one is missing.
    pub(crate) fn find(folder: Option<&Path>) -> Option<Self> {
        let own = std::env::current_exe().ok()?;
        let folder = folder.or_else(|| own.parent())?;
        let binaries = Self {
            dsec: folder.join("dsec"),
            layerd: folder.join("layerd"),
        };
        (binaries.dsec.is_file() && binaries.layerd.is_file()).then_some(binaries)
    }

    /// As [`Self::find`], for benches that cannot do without.
    ///
    /// # Errors
    /// Where one is missing.
    pub(crate) fn require(folder: Option<&Path>) -> Result<Self> {
        Self::find(folder).ok_or_else(|| {
            let text = "`dsec` and `layerd` are not beside this program; build them (`cargo build --release`) or name \
                        their folder with --bin-dir";
            Error::Unexpected(text.to_owned())
        })
    }

    /// Publishes a tree into a directory origin, and returns what `dsec build --json` says.
    ///
    /// # Errors
    /// Where the build fails.
    pub(crate) fn build(&self, tree: &Path, layer: &str, origin: &Path) -> Result<Built> {
        build(&mut self.build_command(tree, layer, origin))
    }

    /// As [`Self::build`], with a layer of the same origin as dictionary.
    ///
    /// # Errors
    /// Where the build fails.
    pub(crate) fn build_with_dict(
        &self,
        tree: &Path,
        layer: &str,
        origin: &Path,
        dict: &str,
    ) -> Result<Built> {
        build(
            self.build_command(tree, layer, origin)
                .args(["--dict", dict]),
        )
    }

    fn build_command(&self, tree: &Path, layer: &str, origin: &Path) -> Command {
        let (axis, rest) = layer.split_once('/').unwrap_or(("base", layer));
        let (name, version) = rest.split_once(':').unwrap_or((rest, "1"));
        let origin = format!("dir:{}", origin.display());
        let mut build = Command::new(&self.dsec);
        build.arg("build").arg(tree);
        build.args([
            "--axis",
            axis,
            "--name",
            name,
            "--version",
            version,
            "--origin",
            &origin,
            "--json",
        ]);
        build
    }

    /// The layer of a tree of the corpus, as in `base/gcc:1`.
    pub(crate) fn layer_name(tree: &str) -> String {
        Self::layer_of(tree, "1")
    }

    /// The layer of a tree in another version.
    pub(crate) fn layer_of(tree: &str, version: &str) -> String {
        let (axis, name) = tree.split_once('-').unwrap_or(("base", tree));
        format!("{axis}/{name}:{version}")
    }

    /// Optimises layers of a directory origin with a trace, each under another version. A layer of which the trace has
    /// nothing keeps its contents under the new version.
    ///
    /// # Errors
    /// Where `dsec optimize` fails.
    pub(crate) fn optimize(
        &self,
        layers: &[String],
        trace: &Path,
        version: &str,
        origin: &Path,
    ) -> Result<()> {
        let mut optimize = Command::new(&self.dsec);
        optimize
            .arg("optimize")
            .args(layers)
            .arg("--trace")
            .arg(trace);
        optimize.args(["--version", version, "--origin"]);
        optimize.arg(format!("dir:{}", origin.display()));
        command::run(&mut optimize).map(drop)
    }

    /// Gives layers of a directory origin other tags, and publishes a trace beside those.
    ///
    /// # Errors
    /// Where `dsec tag` or `dsec trace apply` fails.
    pub(crate) fn apply_trace(
        &self,
        layers: &[String],
        tags: &[String],
        trace: &Path,
        origin: &Path,
    ) -> Result<()> {
        let origin = format!("dir:{}", origin.display());
        for (layer, tag) in layers.iter().zip(tags) {
            let mut command = Command::new(&self.dsec);
            command.args(["tag", layer, tag, "--origin", &origin]);
            command::run(&mut command)?;
        }
        let mut apply = Command::new(&self.dsec);
        apply.args(["trace", "apply"]).args(tags);
        apply.arg("--trace").arg(trace).args(["--origin", &origin]);
        command::run(&mut apply).map(drop)
    }

    /// Publishes trees of the corpus into the store of the work folder, each once for these binaries.
    ///
    /// # Errors
    /// Where a tree cannot be made or built.
    pub(crate) fn ensure_layers(&self, work: &WorkDir, trees: &[&str]) -> Result<PathBuf> {
        let metadata = std::fs::metadata(&self.dsec).on("look at", &self.dsec)?;
        let made_by = format!(
            "{} {:?}\n",
            metadata.len(),
            metadata.modified().on("look at", &self.dsec)?
        );
        let marker = work.root().join("store.made-by");
        if std::fs::read_to_string(&marker).is_ok_and(|text| text != made_by) {
            // Another build of the program may lay layers out in another way.
            work.empty_folder("store")?;
        }
        let store = work.folder("store")?;
        std::fs::write(&marker, made_by).on("write", &marker)?;
        for tree in trees {
            let done = store.join(format!(".built-{tree}"));
            if !done.try_exists().on("look for", &done)? {
                let source = corpus::ensure_tree(work, tree)?;
                progress!("publishing {} …", Self::layer_name(tree));
                self.build(&source, &Self::layer_name(tree), &store)?;
                std::fs::write(&done, "").on("write", &done)?;
            }
        }
        Ok(store)
    }
}

fn build(command: &mut Command) -> Result<Built> {
    let output = command::run(command)?;
    serde_json::from_slice(&output).during(format!(
        "reading what `{}` printed",
        command::shown(command)
    ))
}

/// What `dsec build --json` says.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Built {
    /// Bytes of file data in the source.
    pub(crate) bytes_in: u64,
}

/// What `dsec stats --json` says, as far as it is used here.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Stats {
    #[serde(default)]
    pub(crate) total: Counters,
    pub(crate) data_plane_pid: Option<u32>,
    pub(crate) control_pid: Option<u32>,
}

/// Counters of `layerd`.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Counters {
    pub(crate) fetched_plain_bytes: u64,
    pub(crate) needed_bytes: u64,
    pub(crate) fuse_reads: u64,
}

/// A running `layerd`, ended (with its mounts) when this is dropped.
#[derive(Debug)]
pub(crate) struct Layerd {
    child: Child,
    socket: PathBuf,
    binaries: Binaries,
    mountpoints: Vec<PathBuf>,
}

impl Layerd {
    /// Starts `layerd` over an origin and a cache folder, and waits until it listens. Its log goes to
    /// `CACHE.log`.
    ///
    /// # Errors
    /// Where it does not listen in time.
    pub(crate) fn start(binaries: &Binaries, origin: &str, cache: &Path) -> Result<Self> {
        let socket = cache.with_extension("sock");
        let log_path = cache.with_extension("log");
        let log = std::fs::File::create(&log_path).on("make", &log_path)?;
        if socket.try_exists().on("look for", &socket)? {
            std::fs::remove_file(&socket).on("remove", &socket)?;
        }
        let mut start = Command::new(&binaries.layerd);
        start
            .args(["--origin", origin, "--cache"])
            .arg(cache)
            .arg("--socket")
            .arg(&socket);
        let child = start
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let child = child.during(format!("starting {}", command::shown(&start)))?;
        let mut layerd = Self {
            child,
            socket,
            binaries: binaries.clone(),
            mountpoints: Vec::new(),
        };
        let deadline = Instant::now() + LAYERD_WAIT_MAX;
        while std::os::unix::net::UnixStream::connect(&layerd.socket).is_err() {
            let ended = layerd.child.try_wait().during("looking at layerd")?;
            if ended.is_some() || Instant::now() > deadline {
                let said = std::fs::read(&log_path).unwrap_or_default();
                return Err(Error::Program {
                    command: command::shown(&start),
                    status: ended.map_or("does not listen".to_owned(), |status| status.to_string()),
                    stderr: command::tail(&said),
                });
            }
            std::thread::sleep(LAYERD_POLL);
        }
        Ok(layerd)
    }

    /// The command that mounts layers; run it on the clock, then [`Self::adopt`] the mount.
    pub(crate) fn mount_command(&self, layers: &[String], at: &Path, rw: bool) -> Command {
        let mut mount = Command::new(&self.binaries.dsec);
        mount
            .arg("mount")
            .args(layers)
            .arg(at)
            .arg("--socket")
            .arg(&self.socket);
        if rw {
            mount.arg("--rw");
        }
        mount
    }

    /// Notes a mount, to be taken down with the daemon.
    pub(crate) fn adopt(&mut self, at: &Path) {
        self.mountpoints.push(at.to_owned());
    }

    /// Mounts layers.
    ///
    /// # Errors
    /// Where `dsec mount` fails.
    pub(crate) fn mount(&mut self, layers: &[String], at: &Path, rw: bool) -> Result<()> {
        command::run(&mut self.mount_command(layers, at, rw))?;
        self.adopt(at);
        Ok(())
    }

    /// Records what was read of a mount.
    ///
    /// # Errors
    /// Where `dsec trace record` fails.
    pub(crate) fn record(&self, at: &Path, trace: &Path) -> Result<()> {
        let mut record = Command::new(&self.binaries.dsec);
        record
            .args(["trace", "record"])
            .arg(at)
            .arg("--out")
            .arg(trace);
        command::run(record.arg("--socket").arg(&self.socket)).map(drop)
    }

    /// Unmounts a composition.
    ///
    /// # Errors
    /// Where `dsec umount` fails.
    pub(crate) fn umount(&mut self, at: &Path) -> Result<()> {
        self.mountpoints.retain(|mounted| mounted != at);
        command::run(
            Command::new(&self.binaries.dsec)
                .arg("umount")
                .arg(at)
                .arg("--socket")
                .arg(&self.socket),
        )?;
        Ok(())
    }

    /// The daemon's counters.
    ///
    /// # Errors
    /// Where it does not answer.
    pub(crate) fn stats(&self) -> Result<Stats> {
        let mut stats = Command::new(&self.binaries.dsec);
        stats
            .args(["stats", "--json", "--socket"])
            .arg(&self.socket);
        let output = command::run(&mut stats)?;
        serde_json::from_slice(&output).during("reading what `dsec stats --json` printed")
    }

    /// Its processes: the control process, the data plane, and whatever they started.
    ///
    /// # Errors
    /// Where it does not answer.
    pub(crate) fn processes(&self) -> Result<Vec<String>> {
        let stats = self.stats()?;
        let mut pids = host::process_tree(self.child.id())?;
        pids.extend(stats.data_plane_pid.into_iter().chain(stats.control_pid));
        pids.sort_unstable();
        pids.dedup();
        Ok(pids.iter().map(ToString::to_string).collect())
    }

    /// Unmounts everything and ends the daemon.
    ///
    /// # Errors
    /// Where a mount cannot be taken down.
    pub(crate) fn stop(mut self) -> Result<()> {
        for at in std::mem::take(&mut self.mountpoints) {
            self.umount(&at)?;
        }
        self.terminate();
        Ok(())
    }

    /// Starts another one on the same cache after this one was killed, and hands the mounts over.
    ///
    /// # Errors
    /// Where it does not listen in time.
    pub(crate) fn restart(mut self, origin: &str, cache: &Path) -> Result<Self> {
        self.child.wait().during("waiting for a killed layerd")?;
        let mut next = Self::start(&self.binaries, origin, cache)?;
        next.mountpoints = std::mem::take(&mut self.mountpoints);
        Ok(next)
    }

    /// SIGTERM, then SIGKILL where that is not obeyed in time.
    fn terminate(&mut self) {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap_or_default();
        }
        let deadline = Instant::now() + LAYERD_WAIT_MAX;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(LAYERD_POLL);
        }
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

impl Drop for Layerd {
    fn drop(&mut self) {
        for at in std::mem::take(&mut self.mountpoints) {
            self.umount(&at).unwrap_or_default();
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            self.terminate();
        }
    }
}
