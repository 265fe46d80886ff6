//! Debian's `docker-registry` on a loopback port, with its storage in a folder of the test.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for the server to listen, and times another port is tried.
const START_MAX: Duration = Duration::from_secs(20);
const PORTS_TRIED_MAX: usize = 5;

pub(crate) const USER: &str = "reader";
pub(crate) const PASSWORD: &str = "pa55-w0rd";
/// The user and the bcrypt hash of the password.
const HTPASSWD: &str = "reader:$2b$04$Z1dqPvzhOHLwdOckwGm0Vebp.po0pp0ePIVsTcZ8KaLOVKDWrN1cO\n";

/// A running registry; it ends with the value.
#[derive(Debug)]
pub(crate) struct DockerRegistry {
    child: Child,
    pub(crate) port: u16,
}

/// What differs between registries.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Kind {
    /// Whether manifests can be deleted.
    pub(crate) delete: bool,
    /// Whether only [`USER`] may do anything.
    pub(crate) login: bool,
}

impl DockerRegistry {
    pub(crate) fn start(dir: &Path, kind: Kind) -> Self {
        for _ in 0..PORTS_TRIED_MAX {
            // The port is free now; if somebody takes it before the registry does, that ends and another one is tried.
            let port = {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                listener.local_addr().unwrap().port()
            };
            if let Some(server) = Self::try_port(dir, kind, port) {
                return server;
            }
        }
        let log = fs::read_to_string(dir.join("registry.log")).unwrap_or_default();
        panic!("docker-registry does not start: {log}");
    }

    fn try_port(dir: &Path, kind: Kind, port: u16) -> Option<Self> {
        let config = dir.join("registry.yml");
        let at = dir.display();
        let auth = if kind.login {
            fs::write(dir.join("htpasswd"), HTPASSWD).unwrap();
            format!("auth: {{htpasswd: {{realm: test, path: {at}/htpasswd}}}}\n")
        } else {
            String::new()
        };
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n{auth}storage:\n  \
             filesystem: {{rootdirectory: {at}/registry}}\n  delete: {{enabled: {}}}\n",
            kind.delete
        );
        fs::write(&config, text).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("registry.log")).unwrap())
            .spawn()
            .expect("docker-registry must be installed: run `tools/setup check`");
        let deadline = Instant::now() + START_MAX;
        while child.try_wait().unwrap().is_none() {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(Self { child, port });
            }
            assert!(Instant::now() < deadline, "docker-registry does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    /// `127.0.0.1:port/path`.
    pub(crate) fn at(&self, path: &str) -> String {
        format!("127.0.0.1:{}/{path}", self.port)
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
