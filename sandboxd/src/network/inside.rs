//! What lies inside a sandbox's network namespace: two sockets that all flows come to.
//!
//! Entering a namespace is a thread's affair: each visit is a thread of its own that ends there, so that no other work of the daemon
//! ever runs in a sandbox's network.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::sockopt::{IpTransparent, Ipv4OrigDstAddr, ReuseAddr};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, listen, setsockopt, socket,
};

use super::{NetworkError, netlink};

/// The sandbox's address towards everything that is not its loopback (a range for documentation: nobody's).
pub(super) const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// Connections that may wait to be looked at.
const BACKLOG: i32 = 1024;

/// A namespace that is set up.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) namespace: Arc<OwnedFd>,
    pub(super) tcp: TcpListener,
    pub(super) udp: UdpSocket,
}

/// Runs something in a network namespace.
fn visit<T: Send>(
    namespace: &OwnedFd,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("namespace".to_owned());
        let visited = thread.spawn_scoped(scope, || {
            setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
            work()
        })?;
        let done = visited.join();
        done.unwrap_or_else(|_panic| Err(io::Error::other("a visit to a namespace panicked")))
    })
}

/// A socket that may have any address as its own.
fn transparent(kind: SockType, at: SocketAddrV4) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let made = socket(AddressFamily::Inet, kind, flags, None)?;
    setsockopt(&made, IpTransparent, &true)?;
    // Connections have the port that they were made to, and must not keep it from the sandbox's own servers.
    setsockopt(&made, ReuseAddr, &true)?;
    bind(
        std::os::fd::AsRawFd::as_raw_fd(&made),
        &SockaddrIn::from(at),
    )?;
    Ok(made)
}

/// Has everything that leaves a namespace come to two sockets.
///
/// # Errors
/// What the kernel says.
pub(super) fn set_up(namespace: OwnedFd) -> Result<Inside, NetworkError> {
    let failed = |what| move |source| NetworkError::Io { what, source };
    let made = visit(&namespace, || {
        let named = |what: &'static str| {
            move |e: io::Error| io::Error::new(e.kind(), format!("{what}: {e}"))
        };
        netlink::everything_is_local(OWN).map_err(named("addresses"))?;
        let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        let tcp = transparent(SockType::Stream, any).map_err(named("a socket"))?;
        listen(&tcp, Backlog::new(BACKLOG)?)?;
        let tcp = TcpListener::from(tcp);
        let port = tcp.local_addr()?.port();
        let at = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port);
        let udp = transparent(SockType::Datagram, at).map_err(named("a socket"))?;
        setsockopt(&udp, Ipv4OrigDstAddr, &true)?;
        netlink::hand_everything_to(port, OWN).map_err(named("the filter"))?;
        Ok((tcp, UdpSocket::from(udp)))
    });
    let (tcp, udp) = made.map_err(failed("setting it up"))?;
    Ok(Inside {
        namespace: Arc::new(namespace),
        tcp,
        udp,
    })
}

/// A socket in the namespace that speaks as `address`, to answer datagrams that were sent there. Blocks.
///
/// # Errors
/// What the kernel says.
pub(super) fn speak_as(namespace: &OwnedFd, address: SocketAddrV4) -> io::Result<UdpSocket> {
    visit(namespace, || {
        Ok(UdpSocket::from(transparent(SockType::Datagram, address)?))
    })
}
