//! Debian's nginx as users run it: a master of root, workers of `www-data`, on a loopback port.
//!
//! Where the folder for temporary files is closed to other users, the workers are root's too.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::world::World;

/// Longest wait for the server to listen, and times another port is tried.
const START_MAX: Duration = Duration::from_secs(10);
const PORTS_TRIED_MAX: usize = 5;

fn open_to_all(folder: &Path) -> bool {
    let mut way = folder.ancestors();
    way.all(|part| fs::metadata(part).unwrap().permissions().mode() & 1 == 1)
}

/// A running server; it ends with the value.
#[derive(Debug)]
pub(crate) struct Nginx {
    child: Child,
    port: u16,
}

impl Nginx {
    /// Serves `folder` at `/layers/`; `more` is more configuration of the server.
    pub(crate) fn serve(world: &World, folder: &Path, more: &str) -> Self {
        for _ in 0..PORTS_TRIED_MAX {
            // The port is free now; if somebody takes it before nginx does, nginx ends and another one is tried.
            let port = {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                listener.local_addr().unwrap().port()
            };
            if let Some(server) = Self::try_port(world, folder, more, port) {
                return server;
            }
        }
        let log = fs::read_to_string(world.path("nginx/error.log")).unwrap_or_default();
        panic!("nginx does not start: {log}");
    }

    fn try_port(world: &World, folder: &Path, more: &str, port: u16) -> Option<Self> {
        let prefix = world.folder("nginx");
        let user = if open_to_all(folder) {
            "www-data"
        } else {
            "root"
        };
        let (prefix, folder) = (prefix.display(), folder.display());
        let config = format!(
            "user {user}; daemon off; worker_processes 1; pid {prefix}/pid; error_log {prefix}/error.log info;
            events {{ worker_connections 256; }}
            http {{
                access_log {prefix}/access.log;
                client_body_temp_path {prefix}/body; proxy_temp_path {prefix}/proxy;
                fastcgi_temp_path {prefix}/fastcgi; uwsgi_temp_path {prefix}/uwsgi; scgi_temp_path {prefix}/scgi;
                server {{ listen 127.0.0.1:{port}; root {folder}; rewrite ^/layers/(.*)$ /$1 last; {more} }}
            }}"
        );
        fs::write(world.path("nginx/conf"), config).unwrap();
        let mut child = Command::new("nginx")
            .args(["-e", "stderr", "-p"])
            .arg(world.path("nginx"))
            .arg("-c")
            .arg(world.path("nginx/conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nginx must be installed");
        let deadline = Instant::now() + START_MAX;
        while child.try_wait().unwrap().is_none() {
            let mine = fs::metadata(world.path("nginx/pid")).is_ok_and(|pid| pid.len() > 0);
            if mine && TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(Self { child, port });
            }
            assert!(Instant::now() < deadline, "nginx does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }

    /// The origin's address.
    pub(crate) fn origin(&self) -> String {
        format!("http://127.0.0.1:{}/layers", self.port)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // SIGTERM, so that the master takes its workers along.
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
    }
}
