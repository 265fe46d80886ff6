//! The numbers of the protocol, and its fixed messages. Pure. All integers are big-endian.
#![expect(
    clippy::big_endian_bytes,
    reason = "the protocol's integers are big-endian"
)]

/// First word of the server's greeting.
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting, and the first of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
/// First word of an option's reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a simple reply.
pub const REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flag, both directions: options can be refused one by one.
pub const FIXED_NEWSTYLE: u32 = 1;
/// Handshake flag, both directions: no 124 zeros behind the answer to an old-style choice of export.
pub const NO_ZEROES: u32 = 2;

/// Chooses an export the old way: no error can be told.
pub const OPT_EXPORT_NAME: u32 = 1;
/// The client goes away.
pub const OPT_ABORT: u32 = 2;
/// Asks for the names of the exports.
pub const OPT_LIST: u32 = 3;
/// Asks about an export.
pub const OPT_INFO: u32 = 6;
/// Asks about an export and chooses it.
pub const OPT_GO: u32 = 7;

/// Reply: done.
pub const REP_ACK: u32 = 1;
/// Reply: the name of an export.
pub const REP_SERVER: u32 = 2;
/// Reply: something about an export.
pub const REP_INFO: u32 = 3;
/// Refusal: an option that this server does not know.
pub const REP_ERR_UNSUP: u32 = 0x8000_0001;
/// Refusal: an option with data that makes no sense.
pub const REP_ERR_INVALID: u32 = 0x8000_0003;
/// Refusal: no such export.
pub const REP_ERR_UNKNOWN: u32 = 0x8000_0006;
/// Refusal: an option with too much data.
pub const REP_ERR_TOO_BIG: u32 = 0x8000_0009;

/// Information: size and flags.
pub const INFO_EXPORT: u16 = 0;
/// Information: the export's name.
pub const INFO_NAME: u16 = 1;
/// Information: sizes of requests.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags: always set.
pub const HAS_FLAGS: u16 = 1 << 0;
/// Writes are refused.
pub const READ_ONLY: u16 = 1 << 1;
/// There is a flush.
pub const SEND_FLUSH: u16 = 1 << 2;
/// Requests can ask for a flush of their own.
pub const SEND_FUA: u16 = 1 << 3;
/// There is a trim.
pub const SEND_TRIM: u16 = 1 << 5;
/// There is a write of zeros.
pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
/// A flush on one connection covers the others.
pub const CAN_MULTI_CONN: u16 = 1 << 8;

/// Reads.
pub const CMD_READ: u16 = 0;
/// Writes.
pub const CMD_WRITE: u16 = 1;
/// Goes away; not answered.
pub const CMD_DISC: u16 = 2;
/// Makes answered writes durable.
pub const CMD_FLUSH: u16 = 3;
/// Gives room back.
pub const CMD_TRIM: u16 = 4;
/// Writes zeros.
pub const CMD_WRITE_ZEROES: u16 = 6;

/// Request flag: durable when answered.
pub const FLAG_FUA: u16 = 1 << 0;
/// Request flag of zeros: later writes there should not fail for lack of room. A log cannot promise that, for any write.
pub const FLAG_NO_HOLE: u16 = 1 << 1;

/// Errors of replies.
pub const EPERM: u32 = 1;
/// The disk failed.
pub const EIO: u32 = 5;
/// The request makes no sense.
pub const EINVAL: u32 = 22;
/// No room.
pub const ENOSPC: u32 = 28;

/// Bytes of a request without its data.
pub const REQUEST_BYTES: usize = 28;

/// The head of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// [`FLAG_FUA`] and others.
    pub flags: u16,
    /// [`CMD_READ`] and others.
    pub command: u16,
    /// Chosen by the client, repeated in the reply.
    pub cookie: u64,
    /// Bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*first)
}

/// Takes two bytes off the front.
pub fn take_u16(bytes: &mut &[u8]) -> Option<u16> {
    take(bytes).map(u16::from_be_bytes)
}

/// Takes four bytes off the front.
pub fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(u32::from_be_bytes)
}

/// Takes eight bytes off the front.
pub fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    take(bytes).map(u64::from_be_bytes)
}

impl Request {
    /// Reads a request's head; `None` when the magic is another.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut rest: &[u8] = bytes;
        (take_u32(&mut rest)? == REQUEST_MAGIC).then_some(())?;
        Some(Self {
            flags: take_u16(&mut rest)?,
            command: take_u16(&mut rest)?,
            cookie: take_u64(&mut rest)?,
            offset: take_u64(&mut rest)?,
            len: take_u32(&mut rest)?,
        })
    }

    /// As a client sends it.
    pub fn to_bytes(self) -> Vec<u8> {
        [
            &REQUEST_MAGIC.to_be_bytes()[..],
            &self.flags.to_be_bytes(),
            &self.command.to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            &self.len.to_be_bytes(),
        ]
        .concat()
    }
}

/// The head of a simple reply; data of a read follows it.
pub fn reply(cookie: u64, error: u32) -> Vec<u8> {
    [
        &REPLY_MAGIC.to_be_bytes()[..],
        &error.to_be_bytes(),
        &cookie.to_be_bytes(),
    ]
    .concat()
}

/// The server's greeting.
pub fn greeting() -> Vec<u8> {
    let flags = u16::try_from(FIXED_NEWSTYLE | NO_ZEROES).unwrap_or(0);
    [
        &NBD_MAGIC.to_be_bytes()[..],
        &OPTION_MAGIC.to_be_bytes(),
        &flags.to_be_bytes(),
    ]
    .concat()
}

/// The reply to an option.
pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap_or(0);
    [
        &OPTION_REPLY_MAGIC.to_be_bytes()[..],
        &option.to_be_bytes(),
        &kind.to_be_bytes(),
        &len.to_be_bytes(),
        data,
    ]
    .concat()
}

/// Size and flags, as the old choice of an export is answered.
pub fn size_and_flags(size: u64, flags: u16) -> Vec<u8> {
    [&size.to_be_bytes()[..], &flags.to_be_bytes()].concat()
}

/// Size and flags as information.
pub fn info_export(size: u64, flags: u16) -> Vec<u8> {
    [&INFO_EXPORT.to_be_bytes()[..], &size_and_flags(size, flags)].concat()
}

/// The export's name as information.
pub fn info_name(name: &str) -> Vec<u8> {
    [&INFO_NAME.to_be_bytes()[..], name.as_bytes()].concat()
}

/// Sizes of requests as information: least, best, most.
pub fn info_block_size(least: u32, best: u32, most: u32) -> Vec<u8> {
    [
        &INFO_BLOCK_SIZE.to_be_bytes()[..],
        &least.to_be_bytes(),
        &best.to_be_bytes(),
        &most.to_be_bytes(),
    ]
    .concat()
}

/// A name with its length in front.
pub fn counted_name(name: &str) -> Vec<u8> {
    let len = u32::try_from(name.len()).unwrap_or(0);
    [&len.to_be_bytes()[..], name.as_bytes()].concat()
}
