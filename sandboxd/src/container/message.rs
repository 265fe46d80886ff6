//! Messages with descriptors between our own processes: JSON over a socket that keeps message boundaries.
//!
//! Used where both ends are ours and trust each other (daemon and spawner, agent and launcher). One message is one JSON
//! value and up to [`FDS_MAX`] descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most descriptors of one message.
pub(crate) const FDS_MAX: usize = 16;
/// Most bytes of one message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 256 << 10;

/// Two ends of a connection.
///
/// # Errors
/// What the kernel says.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    for end in [&a, &b] {
        sockopt::set_socket_send_buffer_size(end, MESSAGE_BYTES_MAX * 2)?;
    }
    Ok((a, b))
}

/// Sends one message.
///
/// # Errors
/// `EPIPE` when the other end is gone; an error of its own when the message is too large.
pub(crate) fn send<T: Serialize>(
    socket: impl AsFd,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MESSAGE_BYTES_MAX || fds.len() > FDS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a message of {} bytes and {} descriptors is larger than {MESSAGE_BYTES_MAX} and {FDS_MAX}",
                bytes.len(),
                fds.len()
            ),
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("no room for descriptors"));
    }
    let sent = sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::other("a message was cut"))
    }
}

/// Receives one message; `None` when the other end is gone.
///
/// # Errors
/// When what arrives is not a message of this kind.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    // How long it is, first: a buffer for the longest would be most of what a sandbox's own processes use.
    let peek = RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, len) = rustix::net::recv(&socket, &mut [0; 0], peek)?;
    let mut bytes = vec![0; len.min(MESSAGE_BYTES_MAX)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::other("a message was too large"));
    }
    bytes.truncate(received.bytes);
    Ok(Some((serde_json::from_slice(&bytes)?, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_bounds_and_carry_descriptors() {
        let (a, b) = pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&a, &"one", &[file.as_fd(), file.as_fd()]).unwrap();
        send(&a, &"two".repeat(50_000), &[]).unwrap();
        let (one, fds): (String, _) = receive(&b).unwrap().unwrap();
        assert_eq!((&*one, fds.len()), ("one", 2));
        let (two, fds): (String, _) = receive(&b).unwrap().unwrap();
        assert_eq!((two.len(), fds.len()), (150_000, 0));
        assert!(send(&a, &"x".repeat(MESSAGE_BYTES_MAX), &[]).is_err());
        drop(a);
        assert!(receive::<String>(&b).unwrap().is_none());
    }
}
