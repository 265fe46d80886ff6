//! A small NBD client: what a virtual machine's disk does, with every answer checked.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use disk_server::nbd::wire::{
    CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, NBD_MAGIC, OPT_EXPORT_NAME, OPTION_MAGIC,
    REPLY_MAGIC, Request, counted_name, size_and_flags, take_u32, take_u64,
};

/// A connection in the transmission phase.
#[derive(Debug)]
pub(crate) struct NbdClient {
    stream: UnixStream,
    pub(crate) size: u64,
    cookie: u64,
}

fn u64_bytes(value: u64) -> Vec<u8> {
    let (first, _) = size_and_flags(value, 0)
        .split_first_chunk::<8>()
        .map(|(a, b)| (*a, b.len()))
        .unwrap();
    first.to_vec()
}

/// `value` as four bytes, the length in front of that many.
fn u32_bytes(value: u32) -> Vec<u8> {
    let filler = "x".repeat(usize::try_from(value).unwrap());
    let (first, _) = counted_name(&filler)
        .split_first_chunk::<4>()
        .map(|(a, b)| (*a, b.len()))
        .unwrap();
    first.to_vec()
}

impl NbdClient {
    pub(crate) fn connect(path: &Path) -> Self {
        let mut stream = UnixStream::connect(path).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        let mut rest = &greeting[..];
        assert_eq!(take_u64(&mut rest), Some(NBD_MAGIC));
        assert_eq!(take_u64(&mut rest), Some(OPTION_MAGIC));
        let choice = [
            u32_bytes(3),
            u64_bytes(OPTION_MAGIC),
            u32_bytes(OPT_EXPORT_NAME),
            u32_bytes(0),
        ];
        stream.write_all(&choice.concat()).unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        let size = take_u64(&mut &answer[..]).unwrap();
        Self {
            stream,
            size,
            cookie: 0,
        }
    }

    /// Sends a request and waits for its reply; `Err` when the connection ended or the server said no.
    pub(crate) fn ask(
        &mut self,
        command: u16,
        offset: u64,
        len: usize,
        data: &[u8],
    ) -> Result<Vec<u8>, String> {
        self.cookie += 1;
        let request = Request {
            flags: 0,
            command,
            cookie: self.cookie,
            offset,
            len: u32::try_from(len).unwrap(),
        };
        let text = |error: std::io::Error| error.to_string();
        self.stream.write_all(&request.to_bytes()).map_err(text)?;
        self.stream.write_all(data).map_err(text)?;
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).map_err(text)?;
        let mut rest = &head[..];
        assert_eq!(take_u32(&mut rest), Some(REPLY_MAGIC));
        let error = take_u32(&mut rest).unwrap();
        assert_eq!(take_u64(&mut rest), Some(self.cookie));
        if error != 0 {
            return Err(format!("NBD error {error}"));
        }
        let mut answer = vec![0; if command == CMD_READ { len } else { 0 }];
        self.stream.read_exact(&mut answer).map_err(text)?;
        Ok(answer)
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.ask(CMD_WRITE, offset, data.len(), data).map(drop)
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, String> {
        self.ask(CMD_READ, offset, len, &[])
    }

    pub(crate) fn read_all(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while u64::try_from(all.len()).unwrap() < self.size {
            let at = u64::try_from(all.len()).unwrap();
            let step = usize::try_from((self.size - at).min(1 << 20)).unwrap();
            all.extend(self.read(at, step).unwrap());
        }
        all
    }

    pub(crate) fn flush(&mut self) -> Result<(), String> {
        self.ask(CMD_FLUSH, 0, 0, &[]).map(drop)
    }

    pub(crate) fn trim(&mut self, offset: u64, len: usize) -> Result<(), String> {
        self.ask(CMD_TRIM, offset, len, &[]).map(drop)
    }
}
