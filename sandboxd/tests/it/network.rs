//! What a sandbox with rules reaches, and what not: real servers in a network namespace of this test's own.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use nix::sched::{CloneFlags, unshare};
use sandboxd::backend::Backend as _;
use sandboxd::backend::Place;
use sandboxd::network::policy::Rule;
use sandboxd::network::{Hosts, Networks};

use crate::host::Host;

fn ip(line: &str) {
    let ran = Command::new("ip").args(line.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "ip {line}: {said}");
}

/// Says who it is and what it got, to everybody who connects.
fn tell(listener: TcpListener) {
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                let len = stream.read(&mut buffer).unwrap_or(0);
                let told = format!("{at} got {len}");
                stream.write_all(told.as_bytes()).unwrap_or_default();
            });
        }
    });
}

/// Sends back what comes, and counts it.
fn echo(socket: UdpSocket) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            counted.fetch_add(1, Ordering::SeqCst);
            socket.send_to(buffer.get(..len).unwrap(), from).unwrap();
        }
    });
    count
}

/// A network of two machines: this process (10.77.0.1) and one with servers. Counts of the datagrams that came to ports 9000, 9001.
fn two_machines() -> [Arc<AtomicUsize>; 2] {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    ip("link set lo up");
    let (told, tid) = mpsc::channel();
    let (go, gone) = mpsc::channel();
    let other = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        told.send(nix::unistd::gettid()).unwrap();
        gone.recv().unwrap();
        ip("link set lo up");
        ip("link set v1 up");
        for address in ["10.77.0.2/24", "10.77.0.3/24", "169.254.169.254/32"] {
            ip(&format!("addr add {address} dev v1"));
        }
        ip("route add default via 10.77.0.1");
        for at in [
            "10.77.0.2:8080",
            "10.77.0.2:8081",
            "10.77.0.2:8443",
            "10.77.0.3:8080",
            "10.77.0.3:8081",
            "169.254.169.254:80",
        ] {
            tell(TcpListener::bind(at).unwrap());
        }
        ["10.77.0.2:9000", "10.77.0.2:9001"].map(|at| echo(UdpSocket::bind(at).unwrap()))
    });
    let tid = tid.recv().unwrap();
    ip("link add v0 type veth peer name v1");
    ip(&format!("link set v1 netns {tid}"));
    ip("link set v0 up");
    ip("addr add 10.77.0.1/24 dev v0");
    ip("route add 169.254.169.254/32 dev v0");
    go.send(()).unwrap();
    for at in ["10.77.0.1:8081", "10.77.0.1:8082", "127.0.0.1:8081"] {
        tell(TcpListener::bind(at).unwrap());
    }
    other.join().unwrap()
}

const RULES: &str = r#"[
    {"to": "10.77.0.0/24", "port": [8081, "8083-8085"]},
    {"to": "10.77.0.1", "port": 8082},
    {"to": "169.254.0.0/16", "port": 80},
    {"to": "10.77.0.0/24", "port": 9000, "protocol": "udp"},
    {"to": "pkg.example", "port": [8080, 8443]},
    {"to": "evil.example", "port": 80}
]"#;

const HELP: &str = r#"
import socket, ssl
def tcp(host, port, data=b"x"):
    try:
        with socket.create_connection((host, port), 20) as s:
            s.sendall(data)
            return s.recv(100).decode()
    except OSError as e:
        return type(e).__name__
def hello(name):
    out = ssl.MemoryBIO()
    o = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    try: o.do_handshake()
    except ssl.SSLWantReadError: pass
    return out.read()
def find(name):
    try: return socket.gethostbyname(name)
    except OSError as e: return type(e).__name__
"#;

/// A running network of sandboxes.
struct Net {
    host: Host,
    runtime: tokio::runtime::Runtime,
    networks: Networks,
}

impl Net {
    fn new() -> Self {
        let host = Host::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        let networks = networks(&host);
        Self {
            host,
            runtime,
            networks,
        }
    }

    fn open(&self, name: &str, rules: &str) -> Place {
        let place = self.host.sandbox(name);
        self.open_at(&place, name, rules);
        place
    }

    fn open_at(&self, place: &Place, name: &str, rules: &str) {
        let rules: Vec<Rule> = serde_json::from_str(rules).unwrap();
        let _runtime = self.runtime.enter();
        let namespace = self.host.containers.network(place).unwrap();
        self.networks.open(name, namespace, &rules).unwrap();
    }

    fn says(&self, place: &Place, code: &str) -> String {
        let ran = self.host.python(place, &format!("{HELP}\nprint({code})"));
        let text = ran.text();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert!(errors.is_empty(), "{code}: {errors}");
        text.trim_end().to_owned()
    }
}

fn networks(host: &Host) -> Networks {
    let file = host.dir.path().join("hosts");
    let names =
        "10.77.0.2 pkg.example # ours\n10.77.0.3 other.example\n169.254.169.254 evil.example\n";
    std::fs::write(&file, names).unwrap();
    Networks::new(Hosts::read(&file).unwrap())
}

/// Mutations that were seen to fail: every verdict `Allowed`; names that are not pinned; the host's own addresses taken for others'.
#[test]
fn a_sandbox_reaches_what_its_rules_name_and_nothing_else() {
    let [allowed, denied] = two_machines();
    let net = Net::new();
    let place = net.open("net", RULES);
    let says = |code: &str| net.says(&place, code);
    let refused = "ConnectionResetError";
    // By range; not the host's own address, which must be named itself.
    assert_eq!(says("tcp('10.77.0.3', 8081)"), "10.77.0.3:8081 got 1");
    assert_eq!(says("tcp('10.77.0.1', 8081)"), refused);
    assert_eq!(says("tcp('10.77.0.1', 8082)"), "10.77.0.1:8082 got 1");
    assert_eq!(says("tcp('169.254.169.254', 80)"), refused);
    // The host's loopback is not the sandbox's.
    assert_eq!(says("tcp('127.0.0.1', 8081)"), "ConnectionRefusedError");
    // A name's address is the name's once it was looked up.
    assert_eq!(says("tcp('10.77.0.2', 8080)"), refused);
    assert_eq!(says("find('pkg.example')"), "10.77.0.2");
    assert_eq!(says("tcp('10.77.0.2', 8080)"), "10.77.0.2:8080 got 1");
    assert_eq!(says("tcp('PKG.example', 8080)"), "10.77.0.2:8080 got 1");
    assert_eq!(says("tcp('10.77.0.3', 8080)"), refused);
    // Names that no rule has, names below one, and one that leads to the metadata service.
    for name in ["other.example", "secret.pkg.example", "evil.example"] {
        assert_eq!(says(&format!("find('{name}')")), "gaierror", "{name}");
    }
    assert_eq!(says("tcp('169.254.169.254', 80)"), refused);
    // The name in TLS is the one that was allowed.
    let told = says("tcp('pkg.example', 8443, hello('pkg.example'))[:18]");
    assert_eq!(told, "10.77.0.2:8443 got");
    assert_eq!(
        says("tcp('pkg.example', 8443, hello('other.example'))"),
        refused
    );
    // Datagrams: what is denied was looked at before what is allowed is answered.
    let udp = "(s := socket.socket(type=socket.SOCK_DGRAM), s.settimeout(20), s.sendto(b'no', ('10.77.0.2', 9001)), \
               s.sendto(b'yes', ('10.77.0.2', 9000)), s.recvfrom(9))[-1]";
    assert_eq!(says(udp), "(b'yes', ('10.77.0.2', 9000))");
    assert_eq!([allowed, denied].map(|n| n.load(Ordering::SeqCst)), [1, 0]);
    assert_eq!(says("tcp('fd00::1', 8081)"), "OSError");
    // Its own ports are its own, whatever the rules say of others'.
    let own = "(l := socket.create_server(('', 8081)), c := socket.create_connection(('127.0.0.1', 8081)), l.accept()[0].send(b'me'), c.recv(9))[-1]";
    assert_eq!(says(own), "b'me'");
}

/// Mutation: with the table only made and never removed in `hand_everything_to`, the second gate gets nothing.
#[test]
fn another_daemon_opens_the_gate_again_and_nothing_is_carried_over() {
    two_machines();
    let mut net = Net::new();
    let place = net.open("one", RULES);
    let code = "tcp('10.77.0.2', 8081)";
    assert_eq!(net.says(&place, code), "10.77.0.2:8081 got 1");
    // As after a crash: the sockets are closed, what is in the namespace stays.
    net.networks.close("one");
    net.networks = networks(&net.host);
    assert_eq!(net.says(&place, code), "ConnectionRefusedError");
    net.open_at(&place, "one", RULES);
    assert_eq!(net.says(&place, code), "10.77.0.2:8081 got 1");
    net.networks.close("one");
    net.host.containers.kill(&place).unwrap();
    // The next one of the pool knows nothing of it.
    let fresh = net.host.sandbox("fresh");
    assert_eq!(net.says(&fresh, code), "OSError");
    let seen = net.says(
        &fresh,
        "[l for f in ('route', 'tcp', 'udp', 'fib_trie') for l in open('/proc/net/' + f) if '192.0.2' in l or 'C0000202' in l]",
    );
    assert_eq!(seen, "[]");
    assert_eq!(
        net.says(&fresh, "open('/proc/net/dev').read().count(':')"),
        "1"
    );
}
