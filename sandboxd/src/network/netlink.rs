//! The few messages to the kernel that make a namespace's packets come to us: an address, a route, a filter.
//!
//! Layouts: linux/netlink.h, linux/rtnetlink.h, linux/netfilter/nf_tables.h. Headers and routes are in the host's order (little-endian
//! on x86-64), what nf_tables is told is in network order.
#![expect(
    clippy::big_endian_bytes,
    reason = "the kernel's interface to nf_tables is in network order"
)]

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::netlink::NETFILTER;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// How long the kernel may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
const HEADER_BYTES: usize = 16;

const REQUEST_ACK: u16 = 0x1 | 0x4;
const REPLACE: u16 = 0x100;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
const ERROR: u16 = 2;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const NF_TABLES: u16 = 10;
const NEW_TABLE: u16 = NF_TABLES << 8;
const DELETE_TABLE: u16 = NF_TABLES << 8 | 2;
const NEW_CHAIN: u16 = NF_TABLES << 8 | 3;
const NEW_RULE: u16 = NF_TABLES << 8 | 6;
const NESTED: u16 = 0x8000;
const LOOPBACK: u32 = 1;
const IPV4: u8 = 2;

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(value.len() + 4).expect("attributes are short");
    let mut out = len.to_le_bytes().to_vec();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(value);
    padded(out)
}

fn nested(kind: u16, parts: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NESTED, &parts.concat())
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), &[0]].concat())
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

/// Messages to be sent at a stroke.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    /// Number of the last message, and how many want to be answered.
    sequence: u32,
    answers: usize,
}

impl Batch {
    fn add(&mut self, kind: u16, flags: u16, payload: &[u8]) {
        self.sequence += 1;
        let len = u32::try_from(HEADER_BYTES + payload.len()).expect("messages are short");
        self.bytes.extend_from_slice(&len.to_le_bytes());
        self.bytes.extend_from_slice(&kind.to_le_bytes());
        self.bytes.extend_from_slice(&flags.to_le_bytes());
        self.bytes.extend_from_slice(&self.sequence.to_le_bytes());
        self.bytes.extend_from_slice(&0_u32.to_le_bytes());
        self.bytes.extend_from_slice(payload);
        self.bytes = padded(std::mem::take(&mut self.bytes));
        if flags & REQUEST_ACK == REQUEST_ACK {
            self.answers += 1;
        }
    }

    fn table(&mut self, kind: u16, flags: u16, attributes: &[Vec<u8>]) {
        let payload = [&[IPV4, 0, 0, 0][..], &attributes.concat()].concat();
        self.add(kind, REQUEST_ACK | flags, &payload);
    }

    fn send(&self, protocol: Option<Protocol>) -> io::Result<()> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        rustix::net::send(&socket, &self.bytes, SendFlags::empty())?;
        let mut answers = 0;
        while answers < self.answers {
            answers += read_answers(&socket)?;
        }
        Ok(())
    }
}

/// Reads what the kernel says; how many messages it answered.
fn read_answers(socket: &OwnedFd) -> io::Result<usize> {
    let mut buffer = vec![0; 16 << 10];
    let (len, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty())?;
    let mut rest = buffer.get(..len).unwrap_or_default();
    let mut answers = 0;
    while let Some((head, _)) = rest.split_first_chunk::<20>() {
        let part = |at: usize, bytes: usize| head.get(at..at + bytes).unwrap_or_default();
        let len = part(0, 4)
            .first_chunk()
            .map_or(0, |b| u32::from_le_bytes(*b));
        let kind = part(4, 2)
            .first_chunk()
            .map_or(0, |b| u16::from_le_bytes(*b));
        let error = part(16, 4)
            .first_chunk()
            .map_or(0, |b| i32::from_le_bytes(*b));
        if kind == ERROR {
            if error != 0 {
                return Err(io::Error::from_raw_os_error(-error));
            }
            answers += 1;
        }
        let len = usize::try_from(len).map_err(io::Error::other)?;
        if len < HEADER_BYTES {
            return Err(io::Error::other("the kernel's answer makes no sense"));
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(answers)
}

/// Gives the loopback interface of this namespace another address, and makes every address local.
///
/// # Errors
/// What the kernel says.
pub(super) fn everything_is_local(own: Ipv4Addr) -> io::Result<()> {
    let mut batch = Batch::default();
    let mut payload = vec![IPV4, 32, 0, 0];
    payload.extend_from_slice(&LOOPBACK.to_le_bytes());
    for kind in [1, 2] {
        payload.extend(attribute(kind, &own.octets()));
    }
    batch.add(NEW_ADDRESS, REQUEST_ACK | CREATE | REPLACE, &payload);
    // Any destination; the table of local addresses, static, scope host, local.
    let mut payload = vec![IPV4, 0, 0, 0, 255, 4, 254, 2, 0, 0, 0, 0];
    payload.extend(attribute(4, &LOOPBACK.to_le_bytes()));
    payload.extend(attribute(7, &own.octets()));
    batch.add(NEW_ROUTE, REQUEST_ACK | CREATE | REPLACE, &payload);
    // NETLINK_ROUTE is number 0.
    batch.send(None)
}

fn expression(name: &str, data: &[Vec<u8>]) -> Vec<u8> {
    nested(1, &[text(1, name), nested(2, data)])
}

/// Goes on if so many bytes of a header (1 network, 2 transport) at an offset are these.
fn header_is(header: u32, offset: u32, value: &[u8]) -> Vec<Vec<u8>> {
    let len = u32::try_from(value.len()).expect("headers are short");
    let load = [
        number(1, 1),
        number(2, header),
        number(3, offset),
        number(4, len),
    ];
    vec![expression("payload", &load), is(value)]
}

fn is(value: &[u8]) -> Vec<u8> {
    expression(
        "cmp",
        &[
            number(1, 1),
            number(2, 0),
            nested(3, &[attribute(1, value)]),
        ],
    )
}

fn protocol_is(protocol: u8) -> Vec<Vec<u8>> {
    // NFT_META_L4PROTO.
    let load = expression("meta", &[number(2, 16), number(1, 1)]);
    vec![load, is(&[protocol])]
}

fn verdict(code: u32) -> Vec<u8> {
    let data = nested(2, &[nested(2, &[number(1, code)])]);
    expression("immediate", &[number(1, 0), data])
}

fn hand_over(port: u16) -> Vec<Vec<u8>> {
    let data = nested(2, &[attribute(1, &port.to_be_bytes())]);
    vec![
        expression("immediate", &[number(1, 1), data]),
        expression("tproxy", &[number(1, u32::from(IPV4)), number(3, 1)]),
        verdict(ACCEPT),
    ]
}

const DROP: u32 = 0;
const ACCEPT: u32 = 1;
/// NFT_REJECT_TCP_RST.
const RESET: u32 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Hands all TCP and UDP that does not go to this namespace's own addresses, and all questions for names, to the transparent
/// sockets at `port`; what is neither is dropped.
///
/// # Errors
/// What the kernel says.
pub(super) fn hand_everything_to(port: u16, own: Ipv4Addr) -> io::Result<()> {
    let mut batch = Batch::default();
    let name = || text(1, "dsec");
    batch.add(BATCH_BEGIN, 0x1, &[0, 0, 0, 10]);
    // Made, removed, made: what an earlier daemon left is replaced, whether it is there or not.
    batch.table(NEW_TABLE, CREATE, &[name()]);
    batch.table(DELETE_TABLE, 0, &[name()]);
    batch.table(NEW_TABLE, CREATE, &[name()]);
    // Before routing (0), earlier than others (-150).
    let hook = nested(4, &[number(1, 0), attribute(2, &(-150_i32).to_be_bytes())]);
    let chain = [name(), text(3, "out"), hook, text(7, "filter")];
    batch.table(NEW_CHAIN, CREATE, &chain);
    let asks = |protocol| {
        [
            protocol_is(protocol),
            header_is(2, 2, &53_u16.to_be_bytes()),
        ]
        .concat()
    };
    let rules = [
        [asks(UDP), hand_over(port)].concat(),
        [asks(TCP), hand_over(port)].concat(),
        [header_is(1, 16, &[127]), vec![verdict(ACCEPT)]].concat(),
        [header_is(1, 16, &own.octets()), vec![verdict(ACCEPT)]].concat(),
        [protocol_is(TCP), hand_over(port)].concat(),
        [protocol_is(UDP), hand_over(port)].concat(),
        // Nobody has the sockets now: a refusal is better than silence.
        [
            protocol_is(TCP),
            vec![expression("reject", &[number(1, RESET)])],
        ]
        .concat(),
        vec![verdict(DROP)],
    ];
    for rule in rules {
        let rule = [name(), text(2, "out"), nested(4, &rule)];
        batch.table(NEW_RULE, CREATE | APPEND, &rule);
    }
    batch.add(BATCH_END, 0x1, &[0, 0, 0, 10]);
    batch.send(Some(NETFILTER))
}
