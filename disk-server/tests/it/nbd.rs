//! The NBD server, message by message.

use disk_server::nbd::handshake::{Agreed, handshake};
use disk_server::nbd::transmission::serve;
use disk_server::nbd::wire::{
    CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, EINVAL, ENOSPC, EPERM,
    FLAG_FUA, OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_LIST, OPTION_MAGIC, REP_ACK,
    REP_ERR_INVALID, REP_ERR_TOO_BIG, REP_ERR_UNKNOWN, REP_ERR_UNSUP, REP_INFO, REP_SERVER,
    Request, counted_name, take_u32, take_u64,
};
use disk_server::nbd::{Export, NbdError};

use crate::memory::{MemDisk, Talk};

/// A number as the protocol writes it.
pub(crate) fn be(value: u64, bytes: usize) -> Vec<u8> {
    value
        .swap_bytes()
        .to_le_bytes()
        .into_iter()
        .skip(8 - bytes)
        .collect()
}

/// An option as a client sends it.
pub(crate) fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let len = u64::try_from(data.len()).unwrap();
    [
        be(OPTION_MAGIC, 8),
        be(option.into(), 4),
        be(len, 4),
        data.to_vec(),
    ]
    .concat()
}

/// A question about an export.
pub(crate) fn question(name: &str) -> Vec<u8> {
    [counted_name(name), be(2, 2), be(1, 2), be(3, 2)].concat()
}

fn shake(export: &Export, flags: u64, options: &[Vec<u8>]) -> (Result<Agreed, NbdError>, Vec<u8>) {
    let sent = [be(flags, 4), options.concat()].concat();
    let mut talk = Talk {
        sent: &sent,
        got: Vec::new(),
    };
    let agreed = handshake(&mut talk, export);
    (agreed, talk.got)
}

/// The replies to options: option, kind, length of data.
fn replies(mut got: &[u8]) -> Vec<(u32, u32, usize)> {
    got = got.get(18..).unwrap();
    let mut out = Vec::new();
    while !got.is_empty() {
        assert_eq!(take_u64(&mut got), Some(0x0003_e889_0455_65a9));
        let (option, kind) = (take_u32(&mut got).unwrap(), take_u32(&mut got).unwrap());
        let len = usize::try_from(take_u32(&mut got).unwrap()).unwrap();
        got = got.get(len..).unwrap();
        out.push((option, kind, len));
    }
    out
}

#[test]
fn options_are_answered_one_by_one() {
    let export = MemDisk::new(1 << 20, false).export();
    let (agreed, got) = shake(
        &export,
        3,
        &[
            option(8, &[]),
            option(OPT_LIST, &[]),
            option(OPT_LIST, b"x"),
            option(OPT_INFO, &question("other")),
            option(OPT_INFO, &question("vm")),
            option(OPT_INFO, b"\0\0\0\x09vm"),
            option(99, &vec![0; 10_000]),
            option(OPT_GO, &question("")),
        ],
    );
    assert_eq!(agreed.unwrap(), Agreed::Serve);
    assert_eq!(got.get(..18).unwrap(), b"NBDMAGICIHAVEOPT\0\x03");
    let kinds: Vec<(u32, u32)> = replies(&got).iter().map(|r| (r.0, r.1)).collect();
    let expected = [
        (8, REP_ERR_UNSUP),
        (OPT_LIST, REP_SERVER),
        (OPT_LIST, REP_ACK),
        (OPT_LIST, REP_ERR_INVALID),
        (OPT_INFO, REP_ERR_UNKNOWN),
        (OPT_INFO, REP_INFO),
        (OPT_INFO, REP_INFO),
        (OPT_INFO, REP_INFO),
        (OPT_INFO, REP_ACK),
        (OPT_INFO, REP_ERR_INVALID),
        (99, REP_ERR_TOO_BIG),
        (OPT_GO, REP_INFO),
        (OPT_GO, REP_INFO),
        (OPT_GO, REP_INFO),
        (OPT_GO, REP_ACK),
    ];
    assert_eq!(kinds, expected);
    let (agreed, _) = shake(&export, 1, &[option(OPT_ABORT, &[])]);
    assert_eq!(agreed.unwrap(), Agreed::Gone);
    // The old way, with and without 124 zeros.
    for (flags, len) in [(1, 10 + 124), (3, 10)] {
        let (agreed, got) = shake(&export, flags, &[option(OPT_EXPORT_NAME, b"vm")]);
        assert_eq!(agreed.unwrap(), Agreed::Serve);
        assert_eq!(got.len(), 18 + len);
        assert_eq!(
            got.get(18..28).unwrap(),
            [be(1 << 20, 8), be(0b1_0110_1101, 2)].concat()
        );
    }
    let read_only = MemDisk::new(4096, true).export();
    let (_, got) = shake(&read_only, 3, &[option(OPT_EXPORT_NAME, b"")]);
    assert_eq!(got.get(26..28).unwrap(), be(0b1_0000_1111, 2));
}

#[test]
fn what_the_protocol_does_not_allow_ends_the_handshake() {
    let export = MemDisk::new(1 << 20, false).export();
    let wrong = |flags, options: &[Vec<u8>]| match shake(&export, flags, options).0 {
        Err(NbdError::Malformed { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(wrong(0, &[]), "client flags");
    assert_eq!(wrong(7, &[]), "client flags");
    assert_eq!(wrong(3, &[vec![1; 16]]), "option magic");
    assert_eq!(
        wrong(3, &[option(OPT_EXPORT_NAME, b"other")]),
        "export name"
    );
    let long = [be(OPTION_MAGIC, 8), be(1, 4), be(u32::MAX.into(), 4)].concat();
    assert_eq!(wrong(3, &[long]), "length of an option");
    assert_eq!(
        wrong(3, &vec![option(OPT_LIST, &[]); 65]),
        "number of options"
    );
    let (cut, _) = shake(&export, 3, &[vec![0x49; 7]]);
    assert!(matches!(cut, Err(NbdError::Io(_))), "{cut:?}");
}

fn request(command: u16, flags: u16, offset: u64, len: u32) -> Vec<u8> {
    let request = Request {
        flags,
        command,
        cookie: u64::from(command) << 32 | offset,
        offset,
        len,
    };
    request.to_bytes()
}

/// Sends requests one connection each, so that their order is theirs; the errors of the replies and all data.
fn ask(disk: &std::sync::Arc<MemDisk>, requests: &[Vec<u8>]) -> Vec<(u32, Vec<u8>)> {
    let mut out = Vec::new();
    for sent in requests {
        let mut got = Vec::new();
        serve(
            &mut sent.as_slice(),
            &mut got,
            &disk.export(),
            &|| (),
            &|| true,
        )
        .unwrap();
        let mut rest = &got[..];
        assert_eq!(take_u32(&mut rest), Some(0x6744_6698));
        let error = take_u32(&mut rest).unwrap();
        take_u64(&mut rest).unwrap();
        out.push((error, rest.to_vec()));
    }
    out
}

/// Red when an error of a read is followed by data, or when a flag or an offset is not looked at.
#[test]
fn requests_are_carried_out_or_refused() {
    let disk = MemDisk::new(8192, false);
    let write = |flags, offset, data: &[u8]| {
        let len = u32::try_from(data.len()).unwrap();
        [request(CMD_WRITE, flags, offset, len), data.to_vec()].concat()
    };
    let answers = ask(
        &disk,
        &[
            write(0, 1000, &[7; 1500]),
            request(CMD_READ, 0, 999, 1502),
            request(CMD_TRIM, 0, 1100, 1000),
            request(CMD_WRITE_ZEROES, 2, 2400, 1),
            request(CMD_READ, 0, 1099, 1002),
            request(CMD_FLUSH, 0, 0, 0),
            write(FLAG_FUA, 0, &[1]),
            request(CMD_READ, 0, 8192, 1),
            request(CMD_READ, 0, u64::MAX, 512),
            request(CMD_READ, 0x80, 0, 1),
            write(0, 8191, &[1, 2]),
            request(CMD_TRIM, 0, 8191, 2),
            request(CMD_WRITE_ZEROES, 0, 0, u32::MAX),
            request(9, 0, 0, 0),
        ],
    );
    let errors: Vec<u32> = answers.iter().map(|a| a.0).collect();
    let expected = [
        0, 0, 0, 0, 0, 0, 0, EINVAL, EINVAL, EINVAL, ENOSPC, EINVAL, ENOSPC, EINVAL,
    ];
    assert_eq!(errors, expected);
    let data = |at: usize| answers.get(at).unwrap().1.clone();
    assert_eq!(data(1), [&[0][..], &[7; 1500], &[0]].concat());
    assert_eq!(data(4), [&[7][..], &[0; 1000], &[7]].concat());
    assert!(answers.iter().skip(7).all(|a| a.1.is_empty()));
    assert_eq!(*disk.flushes.lock().unwrap(), 2, "a flush, and one for FUA");
    let read_only = MemDisk::new(8192, true);
    let answers = ask(
        &read_only,
        &[
            write(0, 0, &[1; 512]),
            request(CMD_TRIM, 0, 0, 512),
            request(CMD_READ, 0, 0, 2),
        ],
    );
    assert_eq!(answers, [(EPERM, vec![]), (EPERM, vec![]), (0, vec![0, 0])]);
}

#[test]
fn a_connection_ends_at_a_request_that_is_none() {
    let disk = MemDisk::new(8192, false);
    let run = |sent: &[u8]| {
        let mut got = Vec::new();
        let ended = serve(&mut &*sent, &mut got, &disk.export(), &|| (), &|| true);
        (ended, got.len())
    };
    let read = request(CMD_READ, 0, 0, 4);
    let (ended, got) = run(&[read.clone(), vec![9; 28]].concat());
    assert!(matches!(
        ended,
        Err(NbdError::Malformed {
            what: "request magic",
            ..
        })
    ));
    assert_eq!(got, 20, "what came before is answered");
    let (ended, got) = run(&[request(CMD_DISC, 0, 0, 0), read.clone()].concat());
    assert!(ended.is_ok());
    assert_eq!(got, 0);
    let (ended, _) = run(&request(CMD_WRITE, 0, 0, (32 << 20) + 1));
    assert!(matches!(
        ended,
        Err(NbdError::Malformed {
            what: "length of a write",
            ..
        })
    ));
    for cut in [1, 27, 28, 29, 31] {
        let sent = [request(CMD_WRITE, 0, 0, 4), vec![1; 4]].concat();
        let (ended, got) = run(sent.get(..cut).unwrap());
        assert!(matches!(ended, Err(NbdError::Io(_))), "{cut}: {ended:?}");
        assert_eq!(got, 0);
    }
    assert_eq!(
        ask(&disk, &[read])[0].1,
        [0; 4],
        "nothing of it was written"
    );
}

/// Two connections change neighbouring bytes of one sector, over and over: neither loses what the other wrote.
///
/// Red without the lock around reading, changing and writing a sector.
#[test]
fn parts_of_a_sector_are_changed_one_at_a_time() {
    let disk = MemDisk::new(512, false);
    let export = disk.export();
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let export = &export;
            scope.spawn(move || {
                for round in 0..3000_u64 {
                    let at = (round % 256) * 2 + thread;
                    let byte = [u8::try_from(round % 250 + 1).unwrap()];
                    export.disk.write(&byte, at).unwrap();
                    let mut found = [0];
                    export.disk.read(&mut found, at).unwrap();
                    assert_eq!(found, byte, "byte {at} in round {round}");
                }
            });
        }
    });
}
