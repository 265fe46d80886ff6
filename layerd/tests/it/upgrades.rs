//! The control process is killed, replaced and started in a changed world while readers run.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use layerd_client::api::MountState;
use rustix::process::Signal;

use crate::daemon::{
    Daemon, SOON, drop_pages, mounts_below, processes_of, read_cold, read_whole, signal, until,
};
use crate::fixture::World;
use crate::web::Web;

/// How long blocked reads may take once layerd is back, and how long any read may take while it is replaced.
const BACK_MAX: Duration = Duration::from_secs(2);

/// Rounds of a test: as given, or as many as `DSEC_CASES` says.
fn rounds(usual: usize) -> usize {
    let wanted = std::env::var("DSEC_CASES").ok();
    wanted.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// One request to the socket, the reply's body.
fn get(daemon: &Daemon, path: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(daemon.socket())?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: layerd\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let (head, body) = reply.split_once("\r\n\r\n").unwrap_or_default();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(body.to_owned())
}

/// Reads pieces of an open file, past the kernel's caches, until told to stop; checks each, and notes the longest wait.
fn read_on(file: &File, data: &[u8], seed: usize, stop: &AtomicBool, longest_us: &AtomicU64) {
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let offset = (seed * 1_000_003 + n * 69_997) * 4096 % (data.len() - 8192);
        let mut bytes = [0; 8192];
        let started = Instant::now();
        file.read_exact_at(&mut bytes, u64::try_from(offset).unwrap())
            .unwrap();
        let took = u64::try_from(started.elapsed().as_micros()).unwrap();
        longest_us.fetch_max(took, Ordering::Relaxed);
        assert!(
            bytes == data[offset..offset + 8192],
            "wrong bytes at {offset}"
        );
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

/// Mutation: a control process that ends the data plane on SIGUSR1 turns the first round red; one that forgets what is cached
/// (another cache folder) the counts of requests.
#[test]
fn replaced_and_killed_again_and_again_under_reads_nobody_notices_and_nothing_is_fetched() {
    let world = World::new();
    let (_, data) = world.publish_data(8);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let mut daemon = Daemon::start(world.dir.path(), &[web.url()], &["--memory", "1MiB"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    let file = File::open(&path).unwrap();
    assert!(read_whole(&path).unwrap() == data);
    until("everything is cached", || {
        daemon.total().cache_write_bytes >= 8 << 20
    });
    let (plane, requests) = (daemon.stats().data_plane_pid, web.requests());
    let (stop, longest_us) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (file, data, stop, longest_us) = (&file, &data, &stop, &longest_us);
            scope.spawn(move || read_on(file, data, seed, stop, longest_us));
        }
        for round in 0..rounds(8) {
            // The upgrade of a package: another file, at the place where the old one was or elsewhere.
            let program = world.path(&format!("layerd-{}", round % 2));
            fs::copy(env!("CARGO_BIN_EXE_layerd"), world.path("new")).unwrap();
            fs::rename(world.path("new"), &program).unwrap();
            daemon.program = Some(program);
            let reads = daemon.total().fuse_reads;
            if round % 2 == 0 {
                assert!(daemon.end(Signal::USR1));
            } else {
                daemon.kill_control();
            }
            daemon.restart();
            until("readers go on", || daemon.total().fuse_reads > reads + 50);
            let mounts = daemon.client().mounts().unwrap().mounts;
            assert_eq!((mounts.len(), mounts[0].state), (1, MountState::Alive));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(daemon.stats().data_plane_pid, plane);
    assert_eq!(web.requests(), requests, "nothing is fetched again");
    assert_eq!(daemon.total().failed_reads, 0);
    let longest = Duration::from_micros(longest_us.load(Ordering::Relaxed));
    assert!(longest < BACK_MAX, "{longest:?}");
}

/// Mutation: without the wishes said again after the welcome (`ask_again`), the read waits for its deadline.
#[test]
fn a_read_that_waits_while_layerd_is_killed_is_answered_soon_after_with_one_more_request() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let mut daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    web.hang(true);
    let all = web.requests();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let bytes = read_cold(&path, 1 << 20, 4096).unwrap();
            (bytes, Instant::now())
        });
        web.wait_for_pack_requests(1);
        daemon.kill_control();
        web.hang(false);
        daemon.restart();
        let back = Instant::now();
        let (bytes, answered) = reader.join().unwrap();
        assert!(bytes == data[1 << 20..][..4096]);
        assert!(answered.saturating_duration_since(back) < BACK_MAX);
    });
    assert_eq!(web.pack_requests(), 2, "the lost one and its repetition");
    assert_eq!(web.requests(), all + 2, "nothing else");
}

/// Mutation: without waiting for what is on its way (`Feed::drain`), there is a second request.
#[test]
fn what_is_on_its_way_when_layerd_is_replaced_is_not_fetched_a_second_time() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let mut daemon = Daemon::start(world.dir.path(), &[web.url()], &["--memory", "0"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    web.hang(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_cold(&path, 1 << 20, 4096));
        web.wait_for_pack_requests(1);
        signal(daemon.pid(), Signal::USR1);
        // No new connections: it is about to leave.
        until("it makes room", || {
            UnixStream::connect(daemon.socket()).is_err()
        });
        web.hang(false);
        until("it has left", || !daemon.lives());
        daemon.restart();
        assert!(reader.join().unwrap().unwrap() == data[1 << 20..][..4096]);
    });
    assert!(read_cold(&path, 1 << 20, 4096).unwrap() == data[1 << 20..][..4096]);
    assert_eq!(web.pack_requests(), 1);
}

/// Mutation: recovering before listening makes no difference at this speed; a pause of 2 s in `recover` before the lock is
/// released leaves `/healthz` fast and only the list of mounts late.
fn come_back(count: usize) {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let point = |n: usize| world.path("mounts").join(format!("{n}"));
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (daemon, point) = (&daemon, &point);
            scope.spawn(move || {
                for n in (worker..count).step_by(4) {
                    daemon.mount(&["base/t:1"], &point(n), false);
                }
            });
        }
    });
    let plane = daemon.stats().data_plane_pid;
    daemon.kill_control();
    let started = Instant::now();
    daemon.spawn();
    until("the socket answers", || get(&daemon, "/healthz").is_ok());
    let answered = started.elapsed();
    let mounts = daemon.client().mounts().unwrap().mounts;
    let back = started.elapsed();
    // The aims are measured on a quiet machine (docs/reliability.md); here it only must not take for ever.
    println!("answers after {answered:?}, all mounts are back after {back:?}");
    assert!(back < SOON, "{back:?}");
    assert_eq!(mounts.len(), count);
    assert!(mounts.iter().all(|mount| mount.state == MountState::Alive));
    assert_eq!(daemon.stats().data_plane_pid, plane);
    for n in [0, count - 1] {
        assert!(read_whole(&point(n).join("data")).unwrap() == data);
    }
    assert!(daemon.end(Signal::TERM));
    assert_eq!(mounts_below(world.dir.path()), [""; 0]);
}

/// Mutation: `recover` adopts without what the data plane serves (`adopt(guarded, None)`).
#[test]
fn a_hundred_mounts_come_back() {
    come_back(100);
}

#[test]
fn a_thousand_mounts_come_back() {
    come_back(1000);
}

/// A share that is not there, as after a reboot or with expired credentials.
///
/// Mutation: with every origin opened at start, layerd does not start and the mounts stay without it.
#[test]
fn without_its_origin_a_new_layerd_serves_what_is_cached_and_the_rest_when_it_is_back() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let args = ["--read-deadline", "600ms", "--memory", "0"];
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    assert!(read_cold(&path, 0, 4096).unwrap() == data[..4096]);
    until("it is cached", || daemon.total().cache_write_bytes > 0);
    daemon.kill_control();
    fs::rename(world.origin(), world.path("away")).unwrap();
    daemon.restart();
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!(mounts[0].state, MountState::Alive);
    assert!(read_cold(&path, 0, 4096).unwrap() == data[..4096]);
    let error = read_cold(&path, 2 << 20, 4096).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    until("the log says why", || {
        let log = daemon.log();
        log.contains("an origin cannot be opened now") && log.contains("segments cannot be fetched")
    });
    fs::rename(world.path("away"), world.origin()).unwrap();
    assert!(read_cold(&path, 2 << 20, 4096).unwrap() == data[2 << 20..][..4096]);
}

/// Without anything to take over, a wrong origin is a mistake to be told at once.
#[test]
fn a_first_start_with_an_origin_that_is_not_there_is_refused() {
    let world = World::new();
    let daemon = Daemon::idle(world.dir.path(), &["dir:/nowhere/at/all".to_owned()], &[]);
    let out = daemon.command().stderr(Stdio::piped()).output().unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.contains("`dir:/nowhere/at/all`"), "{text}");
    assert!(!daemon.socket().exists());
}

/// Mutation: without `FuseMount::wait_for_end` the data plane lives on without a mount, and no mount works again.
#[test]
fn an_aborted_connection_gives_readers_an_error_at_once_and_there_is_a_new_one() {
    let world = World::new();
    let (_, data) = world.publish_data(2);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let plane = daemon.stats().data_plane_pid;
    web.hang(true);
    std::thread::scope(|scope| {
        let path = mnt.join("data");
        let reader = scope.spawn(move || (read_cold(&path, 0, 4096), Instant::now()));
        web.wait_for_pack_requests(1);
        let fuse = daemon.cache().join("run/fuse");
        let aborted = Instant::now();
        // The mount itself is busy.
        rustix::mount::unmount(fuse, rustix::mount::UnmountFlags::FORCE).unwrap_err();
        let (read, ended) = reader.join().unwrap();
        let error = read.unwrap_err().raw_os_error();
        assert!(matches!(error, Some(5 | 107)), "{error:?}");
        assert!(ended.saturating_duration_since(aborted) < Duration::from_secs(1));
    });
    web.hang(false);
    until("there is another data plane", || {
        let now = daemon.stats().data_plane_pid;
        now.is_some() && now != plane
    });
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
}

/// What the kernel still has is served; data beyond it is EIO, and metadata beyond it EIO or ENOTCONN, which EROFS hands on from FUSE.
#[test]
fn metadata_of_a_dead_data_plane_is_an_error_too_never_something_wrong() {
    let world = World::new();
    let tree = world.folder("tree");
    for n in 0..2000 {
        fs::write(
            tree.join(format!("file-with-a-name-of-some-length-{n}")),
            b"x",
        )
        .unwrap();
    }
    world.publish(&tree, "base/m:1");
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    let layer = daemon.mount(&["base/m:1"], &mnt, false).layers[0].clone();
    let image = File::open(daemon.cache().join("run/fuse").join(layer)).unwrap();
    daemon.kill_plane();
    rustix::fs::fadvise(&image, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut failed = 0;
    for n in 0..2000 {
        match fs::metadata(mnt.join(format!("file-with-a-name-of-some-length-{n}"))) {
            Ok(meta) => assert_eq!(meta.len(), 1),
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(5 | 107)), "{error}");
                failed += 1;
            }
        }
    }
    println!("{failed} of 2000 failed");
    assert!(failed > 0);
}

/// Mutation: with `current_exe` in place of `/proc/self/exe`, the new data plane cannot be started.
#[test]
fn a_data_plane_is_started_again_when_the_program_was_replaced_meanwhile() {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let program = world.path("layerd");
    fs::copy(env!("CARGO_BIN_EXE_layerd"), &program).unwrap();
    let mut daemon = Daemon::idle(world.dir.path(), &[world.origin_url()], &[]);
    daemon.program = Some(program.clone());
    daemon.restart();
    fs::remove_file(&program).unwrap();
    daemon.kill_plane();
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
}

/// A message as the two processes write it.
fn send(stream: &mut UnixStream, head: &str) -> std::io::Result<()> {
    let len = u32::try_from(head.len()).unwrap();
    stream.write_all(&len.to_le_bytes())?;
    stream.write_all(&[0; 4])?;
    stream.write_all(head.as_bytes())
}

/// Something that listens where a data plane would, answers the first hello with these messages, and other requests with
/// `done`; the hello.
fn forge_plane(
    daemon: &Daemon,
    says: &'static [&'static str],
) -> std::thread::JoinHandle<serde_json::Value> {
    let run = daemon.cache().join("run");
    fs::create_dir_all(&run).unwrap();
    let listener = UnixListener::bind(run.join("data-plane.sock")).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = None;
        loop {
            let mut lengths = [0; 8];
            if stream.read_exact(&mut lengths).is_err() {
                return hello.unwrap();
            }
            let head = u32::from_le_bytes(lengths[..4].try_into().unwrap());
            let mut text = vec![0; usize::try_from(head).unwrap()];
            stream.read_exact(&mut text).unwrap();
            let message: serde_json::Value = serde_json::from_slice(&text).unwrap();
            // The other side may be gone already.
            let answered = if message["type"] == "hello" {
                hello = Some(message);
                says.iter().try_for_each(|text| send(&mut stream, text))
            } else {
                let id = &message["id"];
                send(
                    &mut stream,
                    &format!(r#"{{"type":"done","id":{id},"failure":null,"stats":null}}"#),
                )
            };
            if answered.is_err() {
                return hello.unwrap();
            }
        }
    })
}

/// Mutation: without the check of the version, layerd adopts it and starts.
#[test]
fn a_data_plane_of_another_version_is_refused_with_what_to_do_and_left_alone() {
    let world = World::new();
    let daemon = Daemon::idle(world.dir.path(), &[world.origin_url()], &[]);
    let plane = forge_plane(
        &daemon,
        &[r#"{"type":"welcome","version":7,"pid":4194304,"layers":[]}"#],
    );
    let out = daemon.command().stderr(Stdio::piped()).output().unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8(out.stderr).unwrap();
    for part in ["version 7", "version 2", "kill 4194304", "EIO"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let hello = plane.join().unwrap();
    assert_eq!(
        (&hello["version"], hello["features"].is_array()),
        (&2.into(), true)
    );
    assert!(daemon.cache().join("run/data-plane.sock").exists());
    assert_eq!(processes_of(world.dir.path()), [0; 0]);
}

/// An older one says nothing of features, a newer one says things that nobody here knows.
#[test]
fn older_and_newer_data_planes_of_the_same_version_are_adopted() {
    for says in [
        &[r#"{"type":"welcome","version":2,"pid":4194304,"layers":[]}"#][..],
        &[
            r#"{"type":"weather","sun":true}"#,
            r#"{"type":"welcome","version":2,"pid":4194304,"layers":[],"features":["weather"],"mood":1}"#,
            r#"{"type":"weather","sun":false}"#,
        ],
    ] {
        let world = World::new();
        let args = ["--no-self-test"];
        let mut daemon = Daemon::idle(world.dir.path(), &[world.origin_url()], &args);
        let plane = forge_plane(&daemon, says);
        daemon.restart();
        assert_eq!(daemon.stats().data_plane_pid, Some(4_194_304));
        assert!(daemon.end(Signal::USR1));
        plane.join().unwrap();
    }
}

/// Device slots in the indexes are read wrong by the kernels that made us use flat addresses. Where a kernel reads them right, there is
/// nothing to find.
///
/// Mutation: without the comparison in `compare`, layerd serves.
#[test]
fn a_kernel_that_reads_wrong_is_refused_by_name_and_nothing_is_left() {
    let world = World::new();
    let args = ["--self-test", "slots"];
    let mut daemon = Daemon::idle(world.dir.path(), &[world.origin_url()], &args);
    daemon.spawn();
    until("the self-test is over", || {
        !daemon.lives() || daemon.log().contains("self-test passed")
    });
    if daemon.lives() {
        println!("this kernel reads device slots right");
        return;
    }
    let log = daemon.log();
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    for part in [
        &*format!("Linux {release} reads layers wrong"),
        "`jumps`",
        "expected",
        "found",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    until("no process is left", || {
        processes_of(world.dir.path()).is_empty()
    });
    assert_eq!(mounts_below(world.dir.path()), [""; 0]);
    assert!(!daemon.socket().exists());
}

/// The self-test costs no request and is in no counter.
#[test]
fn the_self_test_is_made_at_each_start_and_leaves_no_trace() {
    let world = World::new();
    world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let mut daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    until("it has run", || {
        daemon.log().matches("self-test passed").count() == 1
    });
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    drop_pages(&mnt.join("small")).unwrap();
    daemon.kill_control();
    daemon.restart();
    let total = daemon.total();
    assert_eq!(daemon.log().matches("self-test passed").count(), 2);
    assert_eq!(
        (total.served_bytes, total.cache_misses, web.pack_requests()),
        (0, 0, 0)
    );
    assert_eq!(
        fs::read_dir(daemon.cache().join("layers")).unwrap().count(),
        1
    );
    assert!(
        get(&daemon, "/metrics")
            .unwrap()
            .contains("dsec_layerd_self_test_passed 1\n")
    );
}
