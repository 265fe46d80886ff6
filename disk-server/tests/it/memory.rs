//! A disk in memory, and a client's bytes as a stream.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex};

use disk_server::nbd::Export;
use imgstore::disk::bytewise::Bytewise;
use imgstore::disk::device::BlockDevice;
use imgstore::media::Media;
use imgstore::media::mem::MemMedia;

/// Bytes in memory as a disk; counts flushes.
#[derive(Debug)]
pub(crate) struct MemDisk {
    pub(crate) bytes: MemMedia,
    pub(crate) flushes: Mutex<usize>,
    read_only: bool,
}

impl MemDisk {
    pub(crate) fn new(len: usize, read_only: bool) -> Arc<Self> {
        Arc::new(Self {
            bytes: MemMedia::new(vec![0; len]),
            flushes: Mutex::new(0),
            read_only,
        })
    }

    pub(crate) fn export(self: &Arc<Self>) -> Export {
        let disk: Arc<dyn BlockDevice> = Arc::clone(self) as _;
        Export {
            name: "vm".to_owned(),
            disk: Arc::new(Bytewise::new(disk)),
        }
    }
}

impl BlockDevice for MemDisk {
    fn size(&self) -> u64 {
        self.bytes.size().unwrap()
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.bytes.read_at(buffer, offset)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        assert!(
            offset.is_multiple_of(512) && bytes.len().is_multiple_of(512),
            "whole sectors"
        );
        assert!(!self.read_only);
        self.bytes.write_at(bytes, offset)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.write(&vec![0; usize::try_from(len).unwrap()], offset)
    }

    fn flush(&self) -> io::Result<()> {
        *self.flushes.lock().unwrap() += 1;
        Ok(())
    }
}

/// What a client sends, and what it gets.
#[derive(Debug)]
pub(crate) struct Talk<'a> {
    pub(crate) sent: &'a [u8],
    pub(crate) got: Vec<u8>,
}

impl Read for Talk<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.sent.read(buffer)
    }
}

impl Write for Talk<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.got.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
