//! A connection to a port inside a sandbox, for the daemon: made by a process inside, handed out as a descriptor.
//!
//! A socket belongs to the network it was made in. So the daemon speaks to what listens in the sandbox although the sandbox has
//! no way out, and nothing has to relay the bytes.

use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::protocol::{self, Answer, Failure, kind};

/// How long something that listens may take to take the connection.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connects to the sandbox's own loopback, and answers with the connection.
///
/// # Errors
/// When the daemon cannot be told.
pub(crate) fn serve(socket: &OwnedFd, port: u16) -> io::Result<()> {
    rustix::io::ioctl_fionbio(socket, false)?;
    let dialed = dial(port);
    let answer = match &dialed {
        Ok(_) => Answer::Ok,
        Err(error) => Answer::Failed {
            failure: Failure::NotFound,
            message: format!("nothing in the sandbox answers at port {port}: {error}"),
            errno: error.raw_os_error().unwrap_or(0),
        },
    };
    let mut bytes = Vec::new();
    protocol::frame(kind::ANSWER, &[&serde_json::to_vec(&answer)?], &mut bytes);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = dialed.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn dial(port: u16) -> io::Result<TcpStream> {
    let four = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let six = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&four, PATIENCE)
        // Some servers listen at one of both only; the first refusal says more than the second.
        .or_else(|first| TcpStream::connect_timeout(&six, PATIENCE).map_err(|_second| first))
}
