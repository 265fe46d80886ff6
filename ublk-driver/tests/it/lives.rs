//! Devices come and go without a trace.

use std::fs;

use ublk_driver::{Content, Driver, Options, WhyNot};

use crate::contents::{How, MemImage, pattern};
use crate::shell::{nodes, read_direct, sh};

pub(crate) fn probing() {
    assert_eq!(ublk_driver::probe(), Ok(()));
    sh("modprobe -r ublk_drv");
    assert_eq!(ublk_driver::probe(), Err(WhyNot::NoControl));
    sh("modprobe ublk_drv");
    assert_eq!(ublk_driver::probe(), Ok(()));
    let driver = Driver::start(0).unwrap();
    for (bytes, options) in [
        (0, Options::default()),
        (513, Options::default()),
        (
            4096,
            Options {
                depth: 0,
                ..Options::default()
            },
        ),
        (
            4096,
            Options {
                queues: Some(0),
                ..Options::default()
            },
        ),
        (
            4096,
            Options {
                block_bytes: 1000,
                ..Options::default()
            },
        ),
    ] {
        let image = MemImage::new(vec![1; bytes], How::AtOnce);
        driver.add(Content::Image(image), &options).unwrap_err();
    }
    assert_eq!(nodes(), [""; 0]);
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).unwrap().count()
}

/// How often, from the environment of `tools/soak`.
fn rounds(name: &str, usual: usize) -> usize {
    let set = std::env::var(name).ok();
    set.map_or(usual, |text| text.parse().unwrap())
}

/// A value of a file of the kernel like `/proc/meminfo`, in bytes.
fn kernel_says(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = value.and_then(|v| {
        v.trim_matches(|c: char| !c.is_ascii_digit())
            .parse::<u64>()
            .ok()
    });
    kib.unwrap() << 10
}

/// Memory of this process and of the kernel. Caches come and go: only more than these bounds is a leak, which every
/// cycle would add to.
#[derive(Debug, Clone, Copy)]
struct Memory {
    own: u64,
    kernel: u64,
}

impl Memory {
    const OWN_MORE_MAX: u64 = 4 << 20;
    const KERNEL_MORE_MAX: u64 = 24 << 20;

    fn now() -> Self {
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        Self {
            own: kernel_says("/proc/self/status", "VmRSS:"),
            kernel: kernel_says("/proc/meminfo", "SUnreclaim:")
                + kernel_says("/proc/meminfo", "Percpu:")
                + kernel_says("/proc/meminfo", "KernelStack:"),
        }
    }
}

pub(crate) fn add_and_remove_leave_nothing() {
    let driver = Driver::start(0).unwrap();
    let bytes = pattern(64 << 10, 1);
    let mut before = None;
    let mut memory = None;
    for round in 0..rounds("DSEC_UBLK_CYCLES", 50) {
        let image = MemImage::new(bytes.clone(), How::Later);
        let device = driver
            .add(Content::Image(image), &Options::default())
            .unwrap();
        assert!(read_direct(device.path(), 0, bytes.len()).unwrap() == bytes);
        device.remove().unwrap();
        device.remove().unwrap();
        assert_eq!(nodes(), [""; 0], "round {round}");
        drop(device);
        let held = (count("/proc/self/fd"), count("/proc/self/task"));
        // The image's own thread may live a moment longer than the device.
        let (fds, tasks) = *before.get_or_insert(held);
        assert_eq!(held.0, fds, "descriptors, round {round}");
        assert!(held.1 <= tasks + 2, "threads: {} then {}", tasks, held.1);
        if round == 9 {
            memory = Some(Memory::now());
        }
    }
    let (before, now) = (memory.unwrap(), Memory::now());
    println!("memory after ten cycles {before:?}, in the end {now:?}");
    assert!(
        now.own < before.own + Memory::OWN_MORE_MAX,
        "{before:?}, then {now:?}"
    );
    assert!(
        now.kernel < before.kernel + Memory::KERNEL_MORE_MAX,
        "{before:?}, then {now:?}"
    );
    assert_eq!(ublk_driver::devices().unwrap(), []);
}

pub(crate) fn many_at_once_serve_their_own_bytes() {
    let driver = Driver::start(0).unwrap();
    let seeds: Vec<u64> = (0..rounds("DSEC_UBLK_DEVICES", 16))
        .map(|n| n as u64)
        .collect();
    // In parallel: all succeed.
    let devices: Vec<_> = std::thread::scope(|scope| {
        let driver = &driver;
        let add = |seed: &u64| {
            let image = MemImage::new(pattern(64 << 10, *seed), How::Later);
            scope.spawn(move || {
                driver
                    .add(
                        Content::Image(image),
                        &Options {
                            owner: 7,
                            ..Options::default()
                        },
                    )
                    .unwrap()
            })
        };
        let threads: Vec<_> = seeds.iter().map(add).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(ublk_driver::devices().unwrap().len(), devices.len());
    assert!(ublk_driver::devices().unwrap().iter().all(|d| d.owner == 7));
    for (device, seed) in devices.iter().zip(&seeds) {
        let bytes = read_direct(device.path(), 4096, 32 << 10).unwrap();
        assert!(
            bytes == pattern(64 << 10, *seed)[4096..4096 + (32 << 10)],
            "{seed}"
        );
    }
    drop(devices);
    assert_eq!(nodes(), [""; 0]);
}
