//! What a client may send, damaged: the harness of `imgstore/tests/it/fuzz.rs` on the disk server's protocols.

use disk_server::control::{Reply, Request as Asked, receive};
use disk_server::nbd::handshake::{Agreed, handshake};
use disk_server::nbd::transmission::serve;
use disk_server::nbd::wire::{
    CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, OPT_EXPORT_NAME, OPT_GO,
    OPT_INFO, OPT_LIST, Request,
};

use crate::harness::{Target, fuzz};
use crate::memory::{MemDisk, Talk};
use crate::nbd::{be, option, question};

/// A target's part of the time is that of one in `imgstore`.
const TARGETS: usize = 26;

fn told<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "ok".to_owned())
}

/// Everything that a client sends in its life.
fn life(flags: u64, options: &[Vec<u8>], requests: &[(u16, u64, u32)]) -> Vec<u8> {
    let mut out = [be(flags, 4), options.concat()].concat();
    for (command, offset, len) in requests {
        let request = Request {
            flags: 0,
            command: *command,
            cookie: *offset,
            offset: *offset,
            len: *len,
        };
        out.extend(request.to_bytes());
        if *command == CMD_WRITE {
            out.extend(vec![5; usize::try_from(*len).unwrap()]);
        }
    }
    out
}

#[test]
fn nbd() {
    let requests = [
        (CMD_WRITE, 0, 600),
        (CMD_READ, 100, 700),
        (CMD_TRIM, 512, 1024),
        (CMD_WRITE_ZEROES, 3, 5),
        (CMD_FLUSH, 0, 0),
        (CMD_READ, 65_000, 536),
        (CMD_DISC, 0, 0),
    ];
    let asked = [
        option(8, &[]),
        option(OPT_LIST, &[]),
        option(OPT_INFO, &question("vm")),
    ];
    let target = Target {
        corpus: vec![
            life(3, &[option(OPT_GO, &question(""))], &requests),
            life(
                3,
                &[&asked[..], &[option(OPT_GO, &question("vm"))]].concat(),
                &requests,
            ),
            life(1, &[option(OPT_EXPORT_NAME, b"vm")], &requests),
        ],
        fix: |_| (),
        run: Box::new(|bytes| {
            let export = MemDisk::new(64 << 10, false).export();
            let mut talk = Talk {
                sent: bytes,
                got: Vec::new(),
            };
            match handshake(&mut talk, &export) {
                Ok(Agreed::Serve) => {}
                Ok(Agreed::Gone) => return "gone".to_owned(),
                Err(error) => return error.to_string(),
            }
            let mut rest = talk.sent;
            let mut got = Vec::new();
            told(serve(&mut rest, &mut got, &export, &|| (), &|| true))
        }),
    };
    fuzz("nbd", &target, TARGETS);
}

#[test]
fn control() {
    let requests = [
        "\"status\"\n",
        "{\"snapshot\":{\"always\":true}}\n",
        "{\"restack\":{\"count\":1,\"lowers\":[{\"lsmt\":\"/a\"}]}}\n",
        "{\"detach\":{\"force\":false}}\n",
        "{\"layer\":{\"file\":\"a\",\"held_us\":3}}\n",
    ];
    let target = Target {
        corpus: requests.iter().map(|r| r.as_bytes().to_vec()).collect(),
        fix: |_| (),
        run: Box::new(|bytes| {
            let reply = told(receive::<Reply>(bytes, 1 << 16));
            match receive::<Asked>(bytes, 1 << 16) {
                Ok(_) => "ok".to_owned(),
                Err(error) => format!("{error} {reply}"),
            }
        }),
    };
    fuzz("control", &target, TARGETS);
}
