//! The newstyle handshake: options one after the other, until one chooses the disk or the client goes away.

use std::io::{Read, Write};

use super::transmission::{PAYLOAD_MAX, PREFERRED_BYTES};
use super::wire::{
    CAN_MULTI_CONN, FIXED_NEWSTYLE, HAS_FLAGS, INFO_NAME, NO_ZEROES, OPT_ABORT, OPT_EXPORT_NAME,
    OPT_GO, OPT_INFO, OPT_LIST, OPTION_MAGIC, READ_ONLY, REP_ACK, REP_ERR_INVALID, REP_ERR_TOO_BIG,
    REP_ERR_UNKNOWN, REP_ERR_UNSUP, REP_INFO, REP_SERVER, SEND_FLUSH, SEND_FUA, SEND_TRIM,
    SEND_WRITE_ZEROES, counted_name, greeting, info_block_size, info_export, info_name,
    option_reply, size_and_flags, take_u16, take_u32, take_u64,
};
use super::{Export, NbdError};

/// Most options of a handshake; QEMU sends four.
const OPTIONS_MAX: usize = 64;
/// Most data of an option that is looked at: a name of the longest allowed length, and a list of questions.
const OPTION_BYTES_MAX: u32 = 8192;
/// Most data of an option that is thrown away to be able to refuse it politely.
const SKIPPED_BYTES_MAX: u32 = 1 << 20;

/// How a handshake ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreed {
    /// Requests follow.
    Serve,
    /// The client has gone.
    Gone,
}

/// What the disk can do.
fn flags(export: &Export) -> u16 {
    let read_only = if export.disk.is_read_only() {
        READ_ONLY
    } else {
        SEND_TRIM | SEND_WRITE_ZEROES
    };
    HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | read_only
}

/// An option as it came.
struct Choice {
    option: u32,
    /// `None` where it was too long.
    data: Option<Vec<u8>>,
}

fn read_option(stream: &mut dyn Read) -> Result<Choice, NbdError> {
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    let mut rest: &[u8] = &head;
    let magic = take_u64(&mut rest).unwrap_or(0);
    if magic != OPTION_MAGIC {
        let expected = format!("{OPTION_MAGIC:#x}");
        return Err(NbdError::malformed(
            "option magic",
            expected,
            format!("{magic:#x}"),
        ));
    }
    let option = take_u32(&mut rest).unwrap_or(0);
    let len = take_u32(&mut rest).unwrap_or(0);
    if len > SKIPPED_BYTES_MAX {
        let expected = format!("at most {SKIPPED_BYTES_MAX}");
        return Err(NbdError::malformed("length of an option", expected, len));
    }
    if len > OPTION_BYTES_MAX {
        let skipped = std::io::copy(&mut stream.take(u64::from(len)), &mut std::io::sink())?;
        if skipped != u64::from(len) {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        return Ok(Choice { option, data: None });
    }
    let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
    stream.read_exact(&mut data)?;
    Ok(Choice {
        option,
        data: Some(data),
    })
}

/// The name and the questions of `INFO` and `GO`; `None` when the lengths do not fit.
fn parse_question(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut rest = data;
    let len = usize::try_from(take_u32(&mut rest)?).ok()?;
    let (name, mut rest) = rest.split_at_checked(len)?;
    let count = take_u16(&mut rest)?;
    let mut asked = Vec::new();
    for _ in 0..count {
        asked.push(take_u16(&mut rest)?);
    }
    rest.is_empty().then_some((name, asked))
}

fn is_ours(export: &Export, name: &[u8]) -> bool {
    name.is_empty() || name == export.name.as_bytes()
}

/// Answers `INFO` or `GO`; whether the disk was found.
fn describe(
    stream: &mut dyn Write,
    option: u32,
    data: &[u8],
    export: &Export,
) -> Result<bool, NbdError> {
    let Some((name, asked)) = parse_question(data) else {
        let text = b"the lengths in this option do not fit each other";
        stream.write_all(&option_reply(option, REP_ERR_INVALID, text))?;
        return Ok(false);
    };
    if !is_ours(export, name) {
        let text = format!("there is one export here, `{}`", export.name);
        stream.write_all(&option_reply(option, REP_ERR_UNKNOWN, text.as_bytes()))?;
        return Ok(false);
    }
    let mut answer = |data: &[u8]| stream.write_all(&option_reply(option, REP_INFO, data));
    answer(&info_export(export.disk.size(), flags(export)))?;
    // Not only where asked for: what is told here is what will be refused later.
    answer(&info_block_size(1, PREFERRED_BYTES, PAYLOAD_MAX))?;
    if asked.contains(&INFO_NAME) {
        answer(&info_name(&export.name))?;
    }
    stream.write_all(&option_reply(option, REP_ACK, &[]))?;
    Ok(true)
}

/// Greets and answers options.
///
/// # Errors
/// [`NbdError::Malformed`] for what the protocol does not allow; what the socket said.
pub fn handshake(stream: &mut (impl Read + Write), export: &Export) -> Result<Agreed, NbdError> {
    stream.write_all(&greeting())?;
    let mut client = [0; 4];
    stream.read_exact(&mut client)?;
    let client = take_u32(&mut &client[..]).unwrap_or(0);
    if client & FIXED_NEWSTYLE == 0 || client & !(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
        let expected = "1 or 3 (fixed newstyle)";
        return Err(NbdError::malformed(
            "client flags",
            expected,
            format!("{client:#x}"),
        ));
    }
    for _ in 0..OPTIONS_MAX {
        let Choice { option, data } = read_option(stream)?;
        let refuse = |stream: &mut dyn Write, kind, text: &str| {
            stream.write_all(&option_reply(option, kind, text.as_bytes()))
        };
        let Some(data) = data else {
            refuse(stream, REP_ERR_TOO_BIG, "too much data for this option")?;
            continue;
        };
        match option {
            OPT_EXPORT_NAME if is_ours(export, &data) => {
                let mut answer = size_and_flags(export.disk.size(), flags(export));
                if client & NO_ZEROES == 0 {
                    answer.extend([0; 124]);
                }
                stream.write_all(&answer)?;
                return Ok(Agreed::Serve);
            }
            OPT_EXPORT_NAME => {
                // This option cannot be refused in words.
                let expected = format!("`{}` or an empty name", export.name);
                let found = String::from_utf8_lossy(&data).into_owned();
                return Err(NbdError::malformed("export name", expected, found));
            }
            OPT_ABORT => {
                // The client may not wait for the answer.
                drop(stream.write_all(&option_reply(option, REP_ACK, &[])));
                return Ok(Agreed::Gone);
            }
            OPT_LIST if data.is_empty() => {
                let name = counted_name(&export.name);
                stream.write_all(&option_reply(option, REP_SERVER, &name))?;
                stream.write_all(&option_reply(option, REP_ACK, &[]))?;
            }
            OPT_LIST => refuse(stream, REP_ERR_INVALID, "this option has no data")?,
            OPT_INFO => {
                describe(stream, option, &data, export)?;
            }
            OPT_GO => {
                if describe(stream, option, &data, export)? {
                    return Ok(Agreed::Serve);
                }
            }
            _ => refuse(
                stream,
                REP_ERR_UNSUP,
                "this server does not know that option",
            )?,
        }
    }
    let expected = format!("at most {OPTIONS_MAX}");
    Err(NbdError::malformed("number of options", expected, "more"))
}
