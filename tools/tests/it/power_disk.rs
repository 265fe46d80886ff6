//! A disk that notes every write and flush, to tell afterwards what it would hold had the power failed at any of them.
#![expect(
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use imgstore::disk::device::BlockDevice;

const SECTOR: usize = 512;
const BLOCK: usize = 4096;

/// What happened, in order.
#[derive(Debug)]
pub(crate) enum Event {
    Write { offset: usize, bytes: Vec<u8> },
    Zero { offset: usize, len: usize },
    Flush,
    Mark(u64),
}

/// Of all disks of one machine.
pub(crate) type Journal = Arc<Mutex<Vec<Event>>>;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct PowerDisk {
    journal: Journal,
    seen: Mutex<Vec<u8>>,
}

impl PowerDisk {
    pub(crate) fn new(journal: &Journal, bytes: usize) -> Self {
        Self {
            journal: Arc::clone(journal),
            seen: Mutex::new(vec![0; bytes]),
        }
    }
}

fn place(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

impl BlockDevice for PowerDisk {
    fn size(&self) -> u64 {
        self.seen.lock().unwrap().len() as u64
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let at = place(offset);
        buffer.copy_from_slice(&self.seen.lock().unwrap()[at..at + buffer.len()]);
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let (offset, bytes) = (place(offset), bytes.to_vec());
        let mut seen = self.seen.lock().unwrap();
        seen[offset..offset + bytes.len()].copy_from_slice(&bytes);
        // While `seen` is held: the journal has the order in which readers see it.
        self.journal
            .lock()
            .unwrap()
            .push(Event::Write { offset, bytes });
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let (offset, len) = (place(offset), place(len));
        let mut seen = self.seen.lock().unwrap();
        seen[offset..offset + len].fill(0);
        self.journal
            .lock()
            .unwrap()
            .push(Event::Zero { offset, len });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.journal.lock().unwrap().push(Event::Flush);
        Ok(())
    }
}

/// A disk to which a guest writes a number to say that it knows something now.
#[derive(Debug)]
pub(crate) struct MarkDisk(pub(crate) Journal);

impl BlockDevice for MarkDisk {
    fn size(&self) -> u64 {
        1 << 20
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], _: u64) -> io::Result<()> {
        buffer.fill(0);
        Ok(())
    }

    fn write(&self, bytes: &[u8], _: u64) -> io::Result<()> {
        let mark = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        self.0.lock().unwrap().push(Event::Mark(mark));
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The marks among events.
pub(crate) fn marks(events: &[Event]) -> Vec<u64> {
    let mark = |event: &Event| match event {
        Event::Mark(mark) => Some(*mark),
        _ => None,
    };
    events.iter().filter_map(mark).collect()
}

/// What a disk of so many bytes holds when the power fails after `events`: all that came before the last flush; of what came after,
/// each write is there, or is not, or only some of its sectors. `random` gives a number below another.
pub(crate) fn after(
    events: &[Event],
    bytes: usize,
    random: &mut dyn FnMut(usize) -> usize,
) -> Vec<u8> {
    let synced = events.iter().rposition(|e| matches!(e, Event::Flush));
    let synced = synced.unwrap_or(0);
    let mut disk = vec![0; bytes];
    for (number, event) in events.iter().enumerate() {
        let fate = if number < synced { 3 } else { random(4) };
        match event {
            Event::Zero { offset, len } if fate > 0 => disk[*offset..offset + len].fill(0),
            Event::Write { offset, bytes } if fate > 0 => {
                for (sector, part) in bytes.chunks(SECTOR).enumerate() {
                    if fate == 1 && random(2) == 0 {
                        continue;
                    }
                    let at = offset + sector * SECTOR;
                    disk[at..at + part.len()].copy_from_slice(part);
                }
            }
            _ => {}
        }
    }
    disk
}

/// As a file with holes.
pub(crate) fn save(disk: &[u8], path: &Path) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(disk.len() as u64).unwrap();
    for (number, block) in disk.chunks(BLOCK).enumerate() {
        if block.iter().any(|b| *b != 0) {
            file.write_all_at(block, (number * BLOCK) as u64).unwrap();
        }
    }
}

/// Red when `after` keeps what was not flushed, loses what was, or takes sectors in the wrong place.
#[test]
fn what_was_flushed_stays_and_the_rest_is_up_to_chance() {
    let journal = Journal::default();
    let disk = PowerDisk::new(&journal, 4096);
    disk.write(&[1; 1024], 512).unwrap();
    disk.flush().unwrap();
    disk.write(&[2; 1024], 1024).unwrap();
    MarkDisk(Arc::clone(&journal)).write(&[7; 512], 0).unwrap();
    let events = journal.lock().unwrap();
    assert_eq!(marks(&events), [u64::from_le_bytes([7; 8])]);
    let mut state = 1_usize;
    let mut random = |n: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % n
    };
    let found: std::collections::BTreeSet<_> = (0..100)
        .map(|_| {
            let disk = after(&events, 4096, &mut random);
            assert_eq!((disk[0], disk[512], disk[2048]), (0, 1, 0));
            (disk[1024], disk[1536])
        })
        .collect();
    assert_eq!(
        found.into_iter().collect::<Vec<_>>(),
        [(1, 0), (1, 2), (2, 0), (2, 2)]
    );
}
