//! The corruption campaign through the kernel: a server that answers at random, wrong ways and right ones, and readers who get
//! the right bytes or EIO. The thousands of cases are in imgstore's tests; these show that the way through the daemon is no other.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use layerd_client::client::ClientError;

use crate::bad_web::{Act, BadWeb};
use crate::daemon::{Daemon, read_cold, read_whole, until};
use crate::fixture::{World, noise};
use crate::outage::serve;

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11;
        usize::try_from(number % u64::try_from(n).unwrap()).unwrap()
    }

    /// An answer; every second one is right.
    fn act(&mut self) -> Act {
        let by = self.below(5000) + 1;
        let share = u16::try_from(self.below(65_536)).unwrap();
        match self.below(36) {
            0 => Act::Whole,
            1 => Act::OtherOffset(by),
            2 => Act::LyingOffset(by),
            3 => Act::Shorter(by),
            4 => Act::Longer(by),
            5 => Act::CutOff(by),
            6 => Act::ResetAfter(by),
            7 => Act::NoLength(by),
            8 => Act::ChunkedCut(by),
            9 => Act::Gzip,
            10 => Act::SecretGzip,
            11 => Act::Html,
            12 => Act::HtmlInPlace,
            13 => Act::Flip(share, 3),
            14 => Act::Zero(share),
            15 => Act::Status(503, vec!["Retry-After: 0".to_owned()]),
            16 => Act::Reset,
            17 => Act::Garbage,
            18 => Act::Chunked,
            _ => Act::Right,
        }
    }
}

fn answer_at_random(web: &BadWeb, seed: u64, packs: bool) {
    let mut rng = Rng(seed);
    web.tell(move |request| {
        if request.path.starts_with("packs/") == packs {
            rng.act()
        } else {
            Act::Right
        }
    });
}

/// Mutation that was seen red: the digest is not compared in `frame::verified_into`.
#[test]
fn reads_from_a_server_that_answers_at_random_are_right_or_eio() {
    let world = World::new();
    let (layer, data) = world.publish_data(24);
    let segments = layer.manifest.segments.len();
    let web = serve(&world);
    let args = ["--read-deadline", "500ms", "--memory", "0"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    answer_at_random(&web, 7, true);
    let (next, right) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    let offset = n * (256 << 10) + n % 60 * 4096;
                    if offset + 4096 > data.len() {
                        return;
                    }
                    match read_cold(&path, u64::try_from(offset).unwrap(), 4096) {
                        Ok(bytes) => {
                            assert!(bytes == data[offset..offset + 4096], "at {offset}");
                            right.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(error) => assert_eq!(error.raw_os_error(), Some(5), "{error}"),
                    }
                }
            });
        }
    });
    let (cases, right) = (next.into_inner() - 8, right.into_inner());
    println!("{cases} reads of {segments} segments: {right} right");
    assert!(cases >= 90 && right > cases / 4, "{right} of {cases}");
    assert!(daemon.total().verify_failures > 0);
    // What was damaged is nowhere: neither in the cache nor in the kernel.
    web.always(Act::Right);
    assert!(read_whole(&path).unwrap() == data);
}

#[test]
fn mounts_from_a_server_that_answers_at_random_are_right_or_refused() {
    const LAYERS: usize = 24;
    let world = World::new();
    let bytes = noise(64 << 10);
    for n in 0..LAYERS {
        let tree = world.folder(&format!("tree{n}"));
        fs::write(tree.join("data"), &bytes[n * 1000..n * 1000 + 5000]).unwrap();
        world.publish(&tree, &format!("base/t:{n}"));
    }
    let web = serve(&world);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mut mounted = 0;
    for n in 0..LAYERS {
        let mnt = world.folder(&format!("mnt{n}"));
        let tag = format!("base/t:{n}");
        answer_at_random(&web, u64::try_from(n).unwrap() * 77 + 1, false);
        match daemon.try_mount(&[&tag], &mnt, false) {
            Ok(_) => mounted += 1,
            Err(ClientError::Refused(error)) => assert!(error.message.len() > 20, "{error}"),
            Err(error) => panic!("{error}"),
        }
        web.always(Act::Right);
        if daemon.stats().mounts.len() < n + 1 {
            daemon.mount(&[&tag], &mnt, false);
        }
        let data = read_whole(&mnt.join("data")).unwrap();
        assert!(data == bytes[n * 1000..n * 1000 + 5000], "{tag}");
    }
    println!("{LAYERS} mounts: {mounted} at the first try");
    assert!(mounted > 0);
}

/// A placement has no digest. Mutation that was seen red: it is read again from the first origin only.
#[test]
fn a_placement_that_leads_nowhere_is_made_up_for_by_another_origin() {
    let world = World::new();
    let (layer, data) = world.publish_data(1);
    let good = serve(&world);
    let hex = layer.digest.to_hex();
    let mut wrong = layer.placement.clone();
    // Another pack for the first half; for the second half other offsets in the right one.
    let mut nowhere = wrong.packs[0];
    nowhere.digest = imgstore::ids::Digest::of(b"nowhere");
    wrong.packs.push(nowhere);
    let half = wrong.segments.len() / 2;
    for (n, spot) in wrong.segments.iter_mut().enumerate() {
        if n < half {
            spot.0 = 1;
        } else {
            spot.1 -= 7;
        }
    }
    let wrong = wrong.to_bytes();
    let path = imgstore::format::names::placement(&layer.digest);
    let root = world.origin();
    let lying = BadWeb::serve(move |object| {
        if object == path {
            Some(wrong.clone())
        } else {
            fs::read(root.join(object)).ok()
        }
    });
    let args = ["--read-deadline", "5s"];
    let daemon = Daemon::start(world.dir.path(), &[lying.url(), good.url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&[&hex], &mnt, false);
    // The first reads may find out; the next ones are right.
    let path = mnt.join("data");
    for offset in [0, 600 << 10] {
        let at = usize::try_from(offset).unwrap();
        let right = || read_cold(&path, offset, 4096).is_ok_and(|b| b == data[at..at + 4096]);
        until("the placement is made up for", right);
    }
    assert!(read_whole(&path).unwrap() == data);
}
