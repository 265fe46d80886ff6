//! Tells a supervisor that layerd answers (systemd's `Type=notify`: a datagram to the socket in `NOTIFY_SOCKET`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Says that layerd is ready; a name that starts with `@` is an abstract one.
///
/// # Errors
/// What the socket said.
pub(super) fn ready(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?
        .send_to_addr(b"READY=1\n", &address)
        .map(|_sent| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_sockets_hear_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("dsec-notify-{}", std::process::id());
        let heard = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path)),
            (
                format!("@{name}").into(),
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()),
            ),
        ];
        for (address, socket) in heard {
            ready(&address).unwrap();
            let mut text = [0; 64];
            let len = socket.unwrap().recv(&mut text).unwrap();
            assert_eq!(&text[..len], b"READY=1\n");
        }
    }
}
