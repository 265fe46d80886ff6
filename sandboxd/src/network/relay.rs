//! The gate: looks at each flow that a sandbox begins, and carries on what its rules allow.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::dns::{self, Code};
use super::inside::{Inside, speak_as};
use super::policy::{Policy, Protocol, Verdict};
use super::tls::{self, Hello};
use super::{Hosts, NetworkError};

/// Connections of one sandbox at a time.
const STREAMS_MAX: usize = 1024;
/// Pairs of addresses that one sandbox exchanges datagrams between at a time.
const FLOWS_MAX: usize = 256;
/// Questions of one sandbox that are looked up at a time.
const LOOKUPS_MAX: usize = 32;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a name may take to be found.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to say which name it wants.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// A flow of datagrams ends when nothing was said for so long.
const FLOW_IDLE: Duration = Duration::from_secs(60);
const DATAGRAM_BYTES_MAX: usize = 65_535;
const DNS_PORT: u16 = 53;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Gate {
    shared: Arc<Shared>,
    tcp: TcpListener,
    udp: UdpSocket,
}

#[derive(Debug)]
struct Shared {
    policy: Policy,
    hosts: Arc<Hosts>,
    namespace: Arc<OwnedFd>,
    lookups: Semaphore,
    streams: Arc<Semaphore>,
    flows: Mutex<HashMap<(SocketAddrV4, SocketAddrV4), Arc<UdpSocket>>>,
}

/// Whether an address is one of this host's, as it is now.
fn is_own(address: Ipv4Addr) -> bool {
    let Ok(all) = nix::ifaddrs::getifaddrs() else {
        // Not known: then it is taken for one.
        return true;
    };
    all.filter_map(|interface| interface.address)
        .filter_map(|held| held.as_sockaddr_in().map(SockaddrIn::ip))
        .any(|held| held == address)
}

fn v4(address: SocketAddr) -> Option<SocketAddrV4> {
    match address.ip() {
        IpAddr::V4(ip) => Some(SocketAddrV4::new(ip, address.port())),
        IpAddr::V6(_) => None,
    }
}

impl Gate {
    /// Within a runtime.
    pub(super) fn new(
        policy: Policy,
        hosts: Arc<Hosts>,
        inside: Inside,
    ) -> Result<Self, NetworkError> {
        let failed = |source| NetworkError::Io {
            what: "taking its sockets over",
            source,
        };
        let _runtime = tokio::runtime::Handle::current().enter();
        Ok(Self {
            shared: Arc::new(Shared {
                policy,
                hosts,
                namespace: inside.namespace,
                lookups: Semaphore::new(LOOKUPS_MAX),
                streams: Arc::new(Semaphore::new(STREAMS_MAX)),
                flows: Mutex::default(),
            }),
            tcp: TcpListener::from_std(inside.tcp).map_err(failed)?,
            udp: UdpSocket::from_std(inside.udp).map_err(failed)?,
        })
    }

    /// Works until it is aborted; everything that goes through it ends then.
    pub(super) async fn run(self) {
        let mut tasks = JoinSet::new();
        let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
        loop {
            tokio::select! {
                Some(_) = tasks.join_next() => {}
                accepted = self.tcp.accept() => match accepted {
                    Ok((stream, _)) => {
                        let shared = Arc::clone(&self.shared);
                        if let Ok(permit) = Arc::clone(&self.shared.streams).try_acquire_owned() {
                            tasks.spawn(async move {
                                stream_came(&shared, stream).await;
                                drop(permit);
                            });
                        } else {
                            reset(stream);
                        }
                    }
                    // Too many descriptors, say: those who wait go on waiting.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                },
                received = receive(&self.udp, &mut datagram) => {
                    if let Ok((len, from, to)) = received {
                        let bytes = datagram.get(..len).unwrap_or_default();
                        self.datagram_came(&mut tasks, (from, to), bytes).await;
                    }
                }
            }
        }
    }

    async fn datagram_came(
        &self,
        tasks: &mut JoinSet<()>,
        (from, to): (SocketAddrV4, SocketAddrV4),
        bytes: &[u8],
    ) {
        let shared = Arc::clone(&self.shared);
        if to.port() == DNS_PORT {
            let query = bytes.to_vec();
            tasks.spawn(async move {
                if let Some(answer) = shared.answer(&query).await {
                    shared.reply(to, from, &answer).await.unwrap_or_default();
                }
            });
            return;
        }
        let known = shared.flows().get(&(from, to)).cloned();
        if let Some(flow) = known {
            // What the other side does not take is lost, as datagrams are.
            flow.try_send(bytes).unwrap_or_default();
            return;
        }
        let allowed = shared
            .policy
            .verdict((*to.ip(), to.port()), Protocol::Udp, is_own);
        if allowed == Verdict::Denied || shared.flows().len() >= FLOWS_MAX {
            return;
        }
        let opened = async {
            let flow = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
            flow.connect(to).await?;
            Ok::<_, io::Error>(Arc::new(flow))
        };
        if let Ok(flow) = opened.await {
            flow.send(bytes).await.unwrap_or_default();
            shared.flows().insert((from, to), Arc::clone(&flow));
            tasks.spawn(async move {
                flow_back(&shared, &flow, (from, to))
                    .await
                    .unwrap_or_default();
                shared.flows().remove(&(from, to));
            });
        }
    }
}

/// Takes a datagram, and where it was sent to.
async fn receive(
    socket: &UdpSocket,
    buffer: &mut [u8],
) -> io::Result<(usize, SocketAddrV4, SocketAddrV4)> {
    let received = socket.async_io(Interest::READABLE, || {
        let mut parts = [IoSliceMut::new(buffer)];
        let mut space = nix::cmsg_space!(nix::libc::sockaddr_in);
        let fd = socket.as_raw_fd();
        let got = recvmsg::<SockaddrIn>(fd, &mut parts, Some(&mut space), MsgFlags::MSG_DONTWAIT)?;
        let to = got.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::Ipv4OrigDstAddr(to) => Some(SockaddrIn::from(to)),
            _ => None,
        });
        let from = got.address.map(SocketAddrV4::from);
        Ok((got.bytes, from, to.map(SocketAddrV4::from)))
    });
    match received.await? {
        (len, Some(from), Some(to)) => Ok((len, from, to)),
        _ => Err(io::Error::other("a datagram without addresses")),
    }
}

impl Shared {
    fn flows(
        &self,
    ) -> std::sync::MutexGuard<'_, HashMap<(SocketAddrV4, SocketAddrV4), Arc<UdpSocket>>> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn speak_as(&self, address: SocketAddrV4) -> io::Result<UdpSocket> {
        let namespace = Arc::clone(&self.namespace);
        let made = tokio::task::spawn_blocking(move || speak_as(&namespace, address));
        UdpSocket::from_std(made.await.map_err(io::Error::other)??)
    }

    async fn reply(&self, from: SocketAddrV4, to: SocketAddrV4, bytes: &[u8]) -> io::Result<()> {
        let socket = self.speak_as(from).await?;
        socket.send_to(bytes, to).await.map(drop)
    }

    /// The answer to a question for a name; `None` for what is no question.
    async fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let question = dns::question(query)?;
        if !self.policy.knows(&question.name) {
            return Some(dns::answer(query, &question, Code::NoSuchName, &[]));
        }
        if !question.addresses {
            return Some(dns::answer(query, &question, Code::Done, &[]));
        }
        let failed = || Some(dns::answer(query, &question, Code::Failed, &[]));
        let Ok(_turn) = self.lookups.try_acquire() else {
            return failed();
        };
        let looked = tokio::time::timeout(LOOKUP_TIMEOUT, self.hosts.look_up(&question.name));
        let Ok(Ok(found)) = looked.await else {
            return failed();
        };
        let told = self.policy.pin(&question.name, found, is_own);
        Some(dns::answer(query, &question, Code::Done, &told))
    }
}

/// Carries what comes back to the sandbox.
async fn flow_back(
    shared: &Shared,
    flow: &UdpSocket,
    (client, server): (SocketAddrV4, SocketAddrV4),
) -> io::Result<()> {
    let inside = shared.speak_as(server).await?;
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    while let Ok(received) = tokio::time::timeout(FLOW_IDLE, flow.recv(&mut buffer)).await {
        let bytes = buffer.get(..received?).unwrap_or_default();
        inside.send_to(bytes, client).await?;
    }
    Ok(())
}

/// Ends a connection so that the sandbox sees a refusal, not an end.
fn reset(stream: TcpStream) {
    // If the option is refused it ends all the same.
    stream.set_zero_linger().unwrap_or_default();
}

async fn stream_came(shared: &Shared, mut stream: TcpStream) {
    let Some(to) = stream.local_addr().ok().and_then(v4) else {
        return;
    };
    if to.port() == DNS_PORT {
        questions(shared, &mut stream).await.unwrap_or_default();
        return;
    }
    let verdict = shared
        .policy
        .verdict((*to.ip(), to.port()), Protocol::Tcp, is_own);
    let names = match verdict {
        Verdict::Denied => return reset(stream),
        Verdict::Allowed => None,
        Verdict::Named(names) => Some(names),
    };
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(to)).await;
    let Ok(Ok(mut server)) = connected else {
        return reset(stream);
    };
    if let Some(names) = names
        && !asks_for_one_of(&stream, &server, &names).await
    {
        return reset(stream);
    }
    for half in [&stream, &server] {
        // Only a matter of speed.
        half.set_nodelay(true).unwrap_or_default();
    }
    if tokio::io::copy_bidirectional(&mut stream, &mut server)
        .await
        .is_err()
    {
        reset(stream);
    }
}

/// Whether a client that speaks TLS asks for one of the names whose address this is: many servers share an address.
async fn asks_for_one_of(client: &TcpStream, server: &TcpStream, names: &[String]) -> bool {
    let looked = async {
        let mut buffer = vec![0; tls::HELLO_BYTES_MAX];
        let mut seen = 0;
        loop {
            let mut first = [0];
            let len = tokio::select! {
                // Who lets the server speak first does not speak TLS.
                _ = server.peek(&mut first), if seen == 0 => return true,
                len = client.peek(&mut buffer) => len.unwrap_or(0),
            };
            match tls::hello(buffer.get(..len).unwrap_or_default()) {
                Hello::Other => return true,
                Hello::Nameless => return false,
                Hello::Name(name) => return names.contains(&name),
                Hello::Short if len == seen => {
                    if len == 0 {
                        return false;
                    }
                    // The rest is on its way; peeking tells only that there is something.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Hello::Short => seen = len,
            }
        }
    };
    tokio::time::timeout(HELLO_TIMEOUT, looked)
        .await
        .unwrap_or(false)
}

/// Questions over a stream, one after the other.
async fn questions(shared: &Shared, stream: &mut TcpStream) -> io::Result<()> {
    loop {
        let head = tokio::time::timeout(HELLO_TIMEOUT, stream.read_u16());
        let len = head.await.map_err(io::Error::other)??;
        let mut query = vec![0; usize::from(len)];
        let body = tokio::time::timeout(HELLO_TIMEOUT, stream.read_exact(&mut query));
        body.await.map_err(io::Error::other)??;
        let Some(answer) = shared.answer(&query).await else {
            return Ok(());
        };
        stream
            .write_u16(u16::try_from(answer.len()).map_err(io::Error::other)?)
            .await?;
        stream.write_all(&answer).await?;
    }
}
