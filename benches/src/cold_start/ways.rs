//! The ways to a root file system, and one run of a workload in one of them.
//!
//! Before each run the scratch folder (with the local cache) is emptied and the page cache is dropped; then the
//! programs that the way itself needs are read back in, and `layerd` is started, since it is resident in real
//! use. The clock begins with the start of the first program that brings the root: the download, `native-mount`
//! or `dsec mount`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::cold_start::Setting;
use crate::cold_start::sample::Sample;
use crate::cold_start::traced;
use crate::cold_start::workload::Workload;
use crate::command;
use crate::corpus::Form;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::mounts::{self, Mounted};
use crate::native::{NativeRoot, own_program};
use crate::store::{Binaries, Layerd};
use crate::timed::{self, Timed};

/// A way to get a root file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub(crate) enum Way {
    /// Download tar.gz archives and extract them to disk.
    EagerGz,
    /// Download tar.zst archives and extract them to disk.
    EagerZst,
    /// Download EROFS images as zstd streams, then mount them.
    Whole,
    /// `dsec mount` with an empty cache.
    OnDemand,
    /// The same with layers that were optimised with the trace of a first run.
    Traced,
    /// The same with the trace of another workload on the same layers.
    ForeignTrace,
    /// The same with the trace of another workload, published beside layers that are as they were built.
    ForeignApplied,
    /// `dsec mount` with everything in the cache on disk.
    Cached,
    /// Mount local EROFS images.
    Native,
}

impl Way {
    pub(crate) const ALL: [Self; 9] = [
        Self::EagerGz,
        Self::EagerZst,
        Self::Whole,
        Self::OnDemand,
        Self::Traced,
        Self::ForeignTrace,
        Self::ForeignApplied,
        Self::Cached,
        Self::Native,
    ];

    /// Its name in tables and JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::EagerGz => "eager tar.gz",
            Self::EagerZst => "eager tar.zst",
            Self::Whole => "whole",
            Self::OnDemand => "on demand",
            Self::Traced => "traced",
            Self::ForeignTrace => "foreign trace",
            Self::ForeignApplied => "foreign trace, applied",
            Self::Cached => "cached",
            Self::Native => "native",
        }
    }

    /// What it downloads.
    pub(crate) const fn form(self) -> Option<Form> {
        match self {
            Self::EagerGz => Some(Form::TarGz),
            Self::EagerZst => Some(Form::TarZst),
            Self::Whole | Self::Native => Some(Form::ErofsZst),
            Self::OnDemand
            | Self::Traced
            | Self::ForeignTrace
            | Self::ForeignApplied
            | Self::Cached => None,
        }
    }

    /// Whether it needs `dsec` and `layerd`.
    pub(crate) const fn uses_store(self) -> bool {
        matches!(
            self,
            Self::OnDemand
                | Self::Traced
                | Self::ForeignTrace
                | Self::ForeignApplied
                | Self::Cached
        )
    }
}

/// A root that is up, with what keeps it up.
struct Root {
    at: PathBuf,
    mounts: Vec<Mounted>,
    daemon: Option<Layerd>,
}

/// Runs a workload once in one way.
///
/// # Errors
/// Where the way or the workload fails.
pub(crate) fn run(setting: &Setting<'_>, workload: &Workload, way: Way) -> Result<(Sample, Timed)> {
    setting.work.empty_folder("scratch")?;
    let at = setting.work.folder("scratch/root")?;
    host::drop_caches()?;
    warm_programs(setting, way)?;
    let mut daemon = start_daemon(setting, workload, way)?;
    let pids = daemon
        .as_ref()
        .map(Layerd::processes)
        .transpose()?
        .unwrap_or_default();
    setting.origin.set(setting.delay, setting.bandwidth)?;

    let before = Spent::now(&pids)?;
    let began = Instant::now();
    let mut root = bring(setting, workload, way, &at, &mut daemon)?;
    let mount_s = began.elapsed().as_secs_f64();
    let brought = Spent::now(&[])?;
    if workload.writes {
        root.mounts.insert(0, mounts::proc(&root.at)?);
    }
    let timed = timed::chroot(&root.at, workload.command, began)?;
    let after = Spent::now(&pids)?;
    let served = setting.origin.served()?;

    let counters = root
        .daemon
        .as_ref()
        .map(Layerd::stats)
        .transpose()?
        .unwrap_or_default()
        .total;
    let mut pss = 0;
    for pid in &pids {
        pss += host::pss_bytes(pid)?;
    }
    let daemon_cpu_s = after.daemon_cpu_s - before.daemon_cpu_s;
    let daemon_written = after.daemon_written.saturating_sub(before.daemon_written);
    let sample = Sample {
        mount_s,
        first_output_s: timed.first_output.as_secs_f64(),
        done_s: timed.done.as_secs_f64(),
        wire_bytes: served.bytes,
        plain_bytes: plain_bytes(setting, workload, way, counters.fetched_plain_bytes)?,
        requests: served.requests,
        distribution_written_bytes: brought.own_written.saturating_sub(before.own_written)
            + daemon_written,
        workload_written_bytes: after.own_written.saturating_sub(brought.own_written),
        distribution_cpu_s: brought.own_cpu_s - before.own_cpu_s + daemon_cpu_s,
        daemon_cpu_s,
        daemon_pss_bytes: pss,
        daemon_needed_bytes: counters.needed_bytes,
    };
    root.mounts.clear();
    root.daemon.map(Layerd::stop).transpose()?;
    Ok((sample, timed))
}

/// What the bench's children (those it has waited for) and the daemon have used up to now.
struct Spent {
    own_written: u64,
    own_cpu_s: f64,
    daemon_written: u64,
    daemon_cpu_s: f64,
}

impl Spent {
    fn now(daemon: &[String]) -> Result<Self> {
        let mut spent = Self {
            own_written: host::bytes_written("self")?,
            own_cpu_s: host::cpu_s("self")?,
            daemon_written: 0,
            daemon_cpu_s: 0.0,
        };
        for pid in daemon {
            spent.daemon_written += host::bytes_written(pid)?;
            spent.daemon_cpu_s += host::cpu_s(pid)?;
        }
        Ok(spent)
    }
}

/// Reads the programs that the way itself uses back into memory, with their libraries.
fn warm_programs(setting: &Setting<'_>, way: Way) -> Result<()> {
    let mut programs: Vec<PathBuf> = vec!["chroot".into(), own_program()?];
    match way {
        Way::EagerGz => programs.extend(["bash".into(), "tar".into(), "gzip".into()]),
        Way::EagerZst => programs.extend(["bash".into(), "tar".into(), "zstd".into()]),
        Way::Whole => programs.extend(["bash".into(), "zstd".into()]),
        Way::OnDemand | Way::Traced | Way::ForeignTrace | Way::ForeignApplied | Way::Cached => {
            programs.extend(
                setting
                    .binaries
                    .iter()
                    .flat_map(|b| [b.dsec.clone(), b.layerd.clone()]),
            );
        }
        Way::Native => {}
    }
    for program in programs {
        command::run(Command::new(program).arg("--version"))?;
    }
    Ok(())
}

fn start_daemon(setting: &Setting<'_>, workload: &Workload, way: Way) -> Result<Option<Layerd>> {
    let cache = match way {
        Way::OnDemand | Way::Traced | Way::ForeignTrace | Way::ForeignApplied => {
            setting.work.folder("scratch/cache")?
        }
        Way::Cached => setting.work.folder(&cached_folder(workload))?,
        _ => return Ok(None),
    };
    Layerd::start(store_binaries(setting)?, &setting.store_url(), &cache).map(Some)
}

/// Folder whose cache holds everything of a workload.
fn cached_folder(workload: &Workload) -> String {
    format!("cached-{}", workload.trees.join("-"))
}

/// Fills the cache of the cached way: every file of every layer is read once through its mount.
///
/// # Errors
/// Where a layer cannot be mounted or read.
pub(crate) fn fill_cache(setting: &Setting<'_>, workload: &Workload) -> Result<()> {
    let cache = setting.work.empty_folder(&cached_folder(workload))?;
    let at = setting.work.folder("scratch/fill")?;
    let mut daemon = Layerd::start(store_binaries(setting)?, &setting.store_url(), &cache)?;
    for tree in workload.trees {
        daemon.mount(&[Binaries::layer_name(tree)], &at, false)?;
        read_all(&at)?;
        daemon.umount(&at)?;
    }
    daemon.stop()
}

/// Reads every file below a folder.
///
/// # Errors
/// Where one cannot be read.
pub(crate) fn read_all(folder: &Path) -> Result<()> {
    command::shell(
        "find \"$1\" -xdev -type f -exec cat {} + >/dev/null",
        &[folder.as_os_str()],
    )?;
    Ok(())
}

/// Removes the filled cache of a workload, with the daemon's log.
///
/// # Errors
/// Where it cannot be removed.
pub(crate) fn forget_cache(setting: &Setting<'_>, workload: &Workload) -> Result<()> {
    let cache = setting.work.root().join(cached_folder(workload));
    let (log, socket) = (cache.with_extension("log"), cache.with_extension("sock"));
    command::run(Command::new("rm").arg("-rf").args([&cache, &log, &socket]))?;
    Ok(())
}

pub(super) fn store_binaries<'a>(setting: &'a Setting<'_>) -> Result<&'a Binaries> {
    let missing = || Error::Unexpected("this way needs `dsec` and `layerd`".to_owned());
    setting.binaries.as_ref().ok_or_else(missing)
}

/// Brings the root up: everything in here is on the clock.
fn bring(
    setting: &Setting<'_>,
    workload: &Workload,
    way: Way,
    at: &Path,
    daemon: &mut Option<Layerd>,
) -> Result<Root> {
    let mut root = Root {
        at: at.to_owned(),
        mounts: Vec::new(),
        daemon: daemon.take(),
    };
    match way {
        Way::EagerGz => download(
            setting,
            workload,
            Form::TarGz,
            "gzip -dc | tar -xp --numeric-owner --xattrs -C \"$3\"",
            |_| at.to_owned(),
        )?,
        Way::EagerZst => download(
            setting,
            workload,
            Form::TarZst,
            "zstd -dcq | tar -xp --numeric-owner --xattrs -C \"$3\"",
            |_| at.to_owned(),
        )?,
        Way::Whole => {
            let folder = setting.work.folder("scratch/images")?;
            let image = |tree: &str| folder.join(format!("{tree}.erofs"));
            download(
                setting,
                workload,
                Form::ErofsZst,
                "zstd -dcq >\"$3\"",
                image,
            )?;
            let images: Vec<_> = workload.trees.iter().map(|tree| image(tree)).collect();
            // What was just written is in the page cache; reading past it would wait for the disk first.
            root.mounts = native_mount(setting, workload, &images, &["--buffered"])?;
        }
        Way::Native => {
            let images: Vec<_> = workload
                .trees
                .iter()
                .map(|tree| setting.native_image(tree))
                .collect();
            root.mounts = native_mount(setting, workload, &images, &[])?;
        }
        Way::OnDemand | Way::Traced | Way::ForeignTrace | Way::ForeignApplied | Way::Cached => {
            let layers = traced::layers(way, workload);
            if let Some(daemon) = &mut root.daemon {
                daemon.mount(&layers, at, workload.writes)?;
            }
        }
    }
    Ok(root)
}

/// Downloads all layers at once, each through its own pipeline to what `target` names.
fn download(
    setting: &Setting<'_>,
    workload: &Workload,
    form: Form,
    pipeline: &str,
    target: impl Fn(&str) -> PathBuf,
) -> Result<()> {
    let own = own_program()?;
    let mut running = Vec::new();
    for tree in workload.trees {
        let url = format!(
            "{}/artifacts/{tree}.{}",
            setting.origin.url(),
            form.extension()
        );
        let mut shell = command::shell_command(&format!("\"$1\" get \"$2\" | {pipeline}"));
        shell.arg(&own).arg(url).arg(target(tree));
        let child = shell.spawn().during("starting a download")?;
        running.push((shell, child));
    }
    for (shell, mut child) in running {
        let status = child.wait().during("waiting for a download")?;
        if !status.success() {
            let (command, stderr) = (command::shown(&shell), "see above".to_owned());
            return Err(Error::Program {
                command,
                status: status.to_string(),
                stderr,
            });
        }
    }
    Ok(())
}

/// Mounts local images by a program of its own.
///
/// # Errors
/// Where the mount fails.
pub(crate) fn native_mount(
    setting: &Setting<'_>,
    workload: &Workload,
    images: &[PathBuf],
    options: &[&str],
) -> Result<Vec<Mounted>> {
    let root = NativeRoot::prepare(setting.work, images.len(), workload.writes)?;
    command::run(
        Command::new(own_program()?)
            .args(root.arguments(images))
            .args(options),
    )?;
    Ok(root.adopt())
}

/// File-system bytes that arrived: all of the archives or images, or what the daemon decompressed.
fn plain_bytes(setting: &Setting<'_>, workload: &Workload, way: Way, fetched: u64) -> Result<u64> {
    let mut bytes = 0;
    match way {
        Way::EagerGz | Way::EagerZst => {
            for tree in workload.trees {
                bytes += setting.sizes(tree)?.tar_bytes;
            }
        }
        Way::Whole => {
            for tree in workload.trees {
                bytes += crate::corpus::file_len(&setting.native_image(tree))?;
            }
        }
        Way::OnDemand | Way::Traced | Way::ForeignTrace | Way::ForeignApplied => bytes = fetched,
        Way::Cached | Way::Native => {}
    }
    Ok(bytes)
}
