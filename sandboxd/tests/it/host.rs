//! A container backend for one test, and sandboxes whose lowest layer is this machine's own root file system.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandboxd::backend::{Backend as _, Door, Place, Plan};
use sandboxd::container::backend::{Containers, Settings};
use sandboxd::container::cgroup::Limits;
use sandboxd::container::link::{Event, Link, LinkError};
use sandboxd::container::protocol::{Answer, ExecSpec, Exit, Request, kind};

/// Longest wait for anything that must happen.
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) const LIMITS: Limits = Limits {
    memory_bytes: 512 << 20,
    cpus: 2.0,
    pids: 256,
};

/// Waits until `check` says yes.
pub(crate) fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !check() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What an exec wrote, and how it ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exit: Exit,
}

impl Ran {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) containers: Containers,
    pub(crate) runtime: tokio::runtime::Runtime,
    settings: Settings,
    places: std::cell::RefCell<Vec<Place>>,
}

impl Host {
    pub(crate) fn new() -> Self {
        // A memory file system: the layer below is the root file system, and what is written must not lie in a layer.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let name = dir.path().file_name().unwrap().to_str().unwrap();
        let settings = Settings {
            program: env!("CARGO_BIN_EXE_sandboxd").into(),
            run: dir.path().join("run"),
            cgroup: format!("dsec-test-{}", name.trim_start_matches('.')),
            first_id: 1 << 30,
            pool: 1,
        };
        let containers = Containers::start(settings.clone(), &[]).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        Self {
            dir,
            containers,
            runtime,
            settings,
            places: std::cell::RefCell::default(),
        }
    }

    /// Another backend over what this one leaves: a restart.
    pub(crate) fn restart(&mut self, kept: &[Place]) {
        self.containers.close();
        self.containers = Containers::start(self.settings.clone(), kept).unwrap();
    }

    /// The folder of its control groups.
    pub(crate) fn cgroup(&self) -> String {
        self.settings.cgroup.clone()
    }

    pub(crate) fn rw(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn sandbox_of(&self, name: &str, layers: &[PathBuf], limits: &Limits) -> Place {
        let plan = Plan {
            layers,
            rw: &self.rw(name),
            hostname: name,
            limits,
            patience: SOON,
        };
        let place = self.containers.create(&plan).unwrap();
        self.places.borrow_mut().push(place.clone());
        place
    }

    pub(crate) fn sandbox(&self, name: &str) -> Place {
        self.sandbox_of(name, &[PathBuf::from("/")], &LIMITS)
    }

    pub(crate) fn door(&self, place: &Place) -> Door {
        self.containers.door(place)
    }

    /// Runs a program to its end.
    pub(crate) fn exec(&self, place: &Place, spec: ExecSpec) -> Ran {
        self.try_exec(place, spec).unwrap()
    }

    pub(crate) fn try_exec(&self, place: &Place, mut spec: ExecSpec) -> Result<Ran, LinkError> {
        if spec.exec_id.is_empty() {
            spec.exec_id = unique();
        }
        let socket = self.door(place);
        self.runtime.block_on(async {
            let mut link = Link::connect(&socket).await?;
            let request = Request::Exec {
                spec: Box::new(spec),
                stream: false,
                resumed: false,
            };
            let answer = link.request(&request).await?;
            assert!(matches!(answer, Answer::Started { .. }), "{answer:?}");
            collect(&mut link).await
        })
    }

    /// How many processes the sandbox sees: the agent, the launcher, and the one that looks.
    pub(crate) fn processes(&self, place: &Place) -> String {
        let code = "import glob; print(len(glob.glob('/proc/[0-9]*')))";
        self.python(place, code).text()
    }

    /// Runs a line of shell.
    pub(crate) fn sh(&self, place: &Place, line: &str) -> Ran {
        self.exec(place, shell(line))
    }

    /// Runs a line of shell and wants it to do well.
    pub(crate) fn ok(&self, place: &Place, line: &str) -> String {
        let ran = self.sh(place, line);
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.exit.exit_code, 0, "{line}: {errors}");
        ran.text()
    }

    /// Runs Python.
    pub(crate) fn python(&self, place: &Place, code: &str) -> Ran {
        let mut spec = shell("");
        spec.argv = vec!["python3".to_owned(), "-c".to_owned(), code.to_owned()];
        self.exec(place, spec)
    }

    pub(crate) fn ask(&self, place: &Place, request: &Request) -> Result<Answer, LinkError> {
        let socket = self.door(place);
        self.runtime
            .block_on(async { Link::connect(&socket).await?.request(request).await })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for place in self.places.borrow().iter() {
            if let Err(error) = self.containers.kill(place) {
                println!("{place:?}: {error}");
            }
        }
        self.containers.close();
    }
}

/// A line of shell, as an exec.
pub(crate) fn shell(line: &str) -> ExecSpec {
    ExecSpec {
        exec_id: unique(),
        argv: ["/bin/bash", "-c", line].map(str::to_owned).to_vec(),
        ..ExecSpec::default()
    }
}

pub(crate) fn unique() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("x{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Everything that an exec sends until its end.
pub(crate) async fn collect(link: &mut Link) -> Result<Ran, LinkError> {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        match link.next().await? {
            Event::Stdout(_, bytes) => stdout.extend(bytes),
            Event::Stderr(_, bytes) => stderr.extend(bytes),
            Event::Exit(exit) => {
                return Ok(Ran {
                    stdout,
                    stderr,
                    exit: *exit,
                });
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Sends input and its end.
pub(crate) async fn feed(link: &mut Link, bytes: &[u8]) {
    for piece in bytes.chunks(64 << 10) {
        link.send(kind::DATA, piece).await.unwrap();
    }
    link.send(kind::END, &[]).await.unwrap();
}

/// Processes of this machine whose command line holds `needle`.
pub(crate) fn processes_with(needle: &str) -> usize {
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    });
    let line = |pid: u32| std::fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline"));
    pids.filter(|pid| {
        let line = line(*pid).unwrap_or_default();
        *pid != std::process::id() && String::from_utf8_lossy(&line).contains(needle)
    })
    .count()
}
