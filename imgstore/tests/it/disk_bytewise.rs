//! Clients that write parts of sectors at the same time do not undo each other.

use std::io;
use std::sync::{Arc, Mutex};

use imgstore::disk::bytewise::Bytewise;
use imgstore::disk::device::BlockDevice;

const SECTORS: usize = 4;
const ROUNDS: u8 = 200;

/// In memory; whoever reads lets others go first, as a disk does.
#[derive(Debug)]
struct SlowDisk(Mutex<[[u8; 512]; SECTORS]>);

impl SlowDisk {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new([[0; 512]; SECTORS])))
    }
}

fn place(offset: u64) -> usize {
    usize::try_from(offset / 512).unwrap()
}

impl BlockDevice for SlowDisk {
    fn size(&self) -> u64 {
        512 * SECTORS as u64
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(512) && buffer.len() == 512);
        buffer.copy_from_slice(&self.0.lock().unwrap()[place(offset)]);
        for _ in 0..10 {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(512));
        let mut disk = self.0.lock().unwrap();
        for (sector, part) in disk[place(offset)..].iter_mut().zip(bytes.chunks(512)) {
            sector.copy_from_slice(part);
        }
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut disk = self.0.lock().unwrap();
        for sector in &mut disk[place(offset)..place(offset + len)] {
            sector.fill(0);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Four threads write a byte each of the same sectors, over and over. Red when a part is changed under the shared lock.
#[test]
fn parts_of_one_sector_do_not_undo_each_other() {
    let disk = SlowDisk::new();
    let bytewise = Bytewise::new(disk.clone());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let bytewise = &bytewise;
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    // Over the edge of two sectors too: three bytes that end in the next one.
                    bytewise.write(&[round; 3], 509 + thread * 3).unwrap();
                    let mut found = [0; 512];
                    bytewise.read(&mut found, 512).unwrap();
                }
            });
        }
    });
    let found = disk.0.lock().unwrap();
    assert_eq!(found[0][509..], [ROUNDS; 3]);
    assert_eq!(found[1][..9], [ROUNDS; 9]);
    assert_eq!(found[1][9], 0);
}

/// One thread writes a whole sector, and looks; another writes one byte of it. Red when whole sectors are written without the lock.
#[test]
fn a_part_does_not_undo_a_whole_sector() {
    let bytewise = Bytewise::new(SlowDisk::new());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                bytewise.write(&[255], 512 + 7).unwrap();
            }
        });
        let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 1..=ROUNDS {
                bytewise.write(&[round; 512], 512).unwrap();
                for _ in 0..3 {
                    let mut found = [0; 512];
                    bytewise.read(&mut found, 512).unwrap();
                    found[7] = round;
                    assert!(found == [round; 512], "round {round}");
                }
                bytewise.zero(512, 512).unwrap();
            }
        }));
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        end.unwrap();
    });
}
