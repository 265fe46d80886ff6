//! A layerd of one test, its mounts, and a guard that leaves neither processes nor mounts behind.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use layerd_client::api::{Counters, Mount, MountRequest, Stats};
use layerd_client::client::{Client, ClientError};
use rustix::fs::Advice;
use rustix::process::{Pid, Signal, kill_process};

/// Longest wait for anything that must happen.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Waits until `check` says yes.
pub(crate) fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !check() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Mounts at or below `folder`.
pub(crate) fn mounts_below(folder: &Path) -> Vec<String> {
    let folder = folder.to_str().unwrap();
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    points
        .filter(|point| point.starts_with(folder))
        .map(str::to_owned)
        .collect()
}

/// Living processes that have `folder` on their command line.
pub(crate) fn processes_of(folder: &Path) -> Vec<u32> {
    let folder = folder.to_str().unwrap();
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    });
    pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        *pid != std::process::id() && String::from_utf8_lossy(&line).contains(folder)
    })
    .collect()
}

/// Takes a mount away; it may be gone already.
pub(crate) fn detach(point: &Path) {
    if let Err(error) = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH) {
        println!("{}: {error}", point.display());
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    // It may have ended by itself.
    if let Err(error) = kill_process(pid, signal) {
        println!("{pid:?}: {error}");
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Daemon {
    folder: PathBuf,
    origins: Vec<String>,
    extra: Vec<String>,
    /// Set for the control process, which hands it on.
    pub(crate) env: Vec<(&'static str, String)>,
    /// The program, when it is not the one that was built.
    pub(crate) program: Option<PathBuf>,
    child: Option<Child>,
}

impl Daemon {
    /// Starts layerd with its cache, socket and log in `folder` and waits until it answers.
    pub(crate) fn start(folder: &Path, origins: &[String], extra: &[&str]) -> Self {
        let mut daemon = Self::idle(folder, origins, extra);
        daemon.restart();
        daemon
    }

    /// One that is not started yet.
    pub(crate) fn idle(folder: &Path, origins: &[String], extra: &[&str]) -> Self {
        Self {
            folder: folder.to_owned(),
            origins: origins.to_vec(),
            extra: extra.iter().map(|s| (*s).to_owned()).collect(),
            env: Vec::new(),
            program: None,
            child: None,
        }
    }

    /// The command that starts another one like it.
    pub(crate) fn command(&self) -> Command {
        let built = Path::new(env!("CARGO_BIN_EXE_layerd"));
        let mut command = Command::new(self.program.as_deref().unwrap_or(built));
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        for origin in &self.origins {
            command.args(["--origin", origin]);
        }
        command
            .arg("--cache")
            .arg(self.cache())
            .arg("--socket")
            .arg(self.socket())
            .args(&self.extra)
            .env("DSEC_HF3FS_LIB", three_fs_stand_in::library())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// Starts the control process (again) and waits until it answers.
    pub(crate) fn restart(&mut self) {
        self.spawn();
        until("layerd has a data plane", || {
            let stats = self.client().stats();
            stats.is_ok_and(|stats| stats.data_plane_pid.is_some())
        });
    }

    /// Starts the control process and waits for nothing.
    pub(crate) fn spawn(&mut self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("log"))
            .unwrap();
        self.child = Some(self.command().stderr(log).spawn().unwrap());
    }

    /// Whether the control process lives.
    pub(crate) fn lives(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// The control process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.folder.join("cache")
    }

    /// A number of `GET /metrics`: of the line that begins with this.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name} is not in {text}"))
            .trim()
            .parse()
            .unwrap()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(&self.socket())
    }

    pub(crate) fn stats(&self) -> Stats {
        self.client().stats().unwrap()
    }

    /// Mounts that there are without any layer: that of the FUSE files.
    pub(crate) fn own_mounts(&self) -> usize {
        usize::from(self.stats().driver == "fuse")
    }

    pub(crate) fn total(&self) -> Counters {
        self.stats().total
    }

    pub(crate) fn try_mount(
        &self,
        refs: &[&str],
        mountpoint: &Path,
        rw: bool,
    ) -> Result<Mount, ClientError> {
        fs::create_dir_all(mountpoint).unwrap();
        self.client().mount(&MountRequest {
            refs: refs.iter().map(|s| (*s).to_owned()).collect(),
            mountpoint: mountpoint.to_owned(),
            rw,
            trace: None,
            no_trace: false,
        })
    }

    /// Mounts with a trace, or without any.
    pub(crate) fn mount_traced(&self, refs: &[&str], mountpoint: &Path, trace: Option<&str>) {
        let request = MountRequest {
            refs: refs.iter().map(|s| (*s).to_owned()).collect(),
            mountpoint: mountpoint.to_owned(),
            rw: false,
            trace: trace.map(str::to_owned),
            no_trace: trace.is_none(),
        };
        self.client().mount(&request).unwrap();
    }

    pub(crate) fn mount(&self, refs: &[&str], mountpoint: &Path, rw: bool) -> Mount {
        self.try_mount(refs, mountpoint, rw).unwrap()
    }

    /// Kills the control process.
    pub(crate) fn kill_control(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Kills the data plane and waits until the control process has noticed.
    pub(crate) fn kill_plane(&self) {
        let dead = self.stats().data_plane_pid.unwrap();
        signal(dead, Signal::KILL);
        until("there is another data plane", || {
            let pid = self.stats().data_plane_pid;
            pid.is_some_and(|pid| pid != dead)
        });
    }

    /// Sends a signal to the control process and waits for its end; whether it ended well.
    pub(crate) fn end(&mut self, how: Signal) -> bool {
        let mut child = self.child.take().unwrap();
        signal(child.id(), how);
        let mut status = None;
        until("layerd ends", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().success()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            signal(child.id(), Signal::TERM);
            let deadline = Instant::now() + SOON;
            while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            drop(child.kill());
            drop(child.wait());
        }
        for pid in processes_of(&self.cache()) {
            signal(pid, Signal::KILL);
        }
        let left = mounts_below(&self.folder);
        for point in left.iter().rev() {
            detach(Path::new(point));
        }
        if std::thread::panicking() {
            // Shown by the test runner when a test fails.
            println!("--- log of layerd ---\n{}", self.log());
        }
    }
}

/// Drops what the kernel has cached of a file in a mount beside `cache`: its own pages, and the file data (not the
/// metadata) of the FUSE files.
pub(crate) fn drop_pages(path: &Path) -> std::io::Result<()> {
    let drop_from = |path: &Path, offset: u64| {
        let file = File::open(path)?;
        Ok::<_, std::io::Error>(rustix::fs::fadvise(&file, offset, None, Advice::DontNeed)?)
    };
    drop_from(path, 0)?;
    let caches = path.ancestors().map(|folder| folder.join("cache"));
    for cache in caches.filter(|cache| cache.join("run/fuse").is_dir()) {
        for image in fs::read_dir(cache.join("run/fuse"))? {
            let image = image?;
            let meta = cache
                .join("layers")
                .join(image.file_name())
                .join("meta.erofs");
            drop_from(&image.path(), fs::metadata(meta)?.len())?;
        }
    }
    Ok(())
}

/// Reads `len` bytes at `offset`, past whatever the kernel has cached of the file.
pub(crate) fn read_cold(path: &Path, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    drop_pages(path)?;
    let file = File::open(path)?;
    rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// Reads a whole file, past whatever the kernel has cached of it.
pub(crate) fn read_whole(path: &Path) -> std::io::Result<Vec<u8>> {
    drop_pages(path)?;
    fs::read(path)
}
