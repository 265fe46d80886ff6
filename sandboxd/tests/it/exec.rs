//! Running things: streams, ends, time-outs, limits.

use sandboxd::backend::Backend as _;
use sandboxd::container::link::{Event, Link, LinkError};
use sandboxd::container::protocol::{Answer, Failure, Outcome, Request, TerminalSize, kind};
use sandboxd::container::spool::{HEAD_BYTES_MAX, TAIL_BYTES_MAX};

use crate::host::{Host, LIMITS, collect, feed, processes_with, shell, until};

#[test]
fn bytes_are_bytes_and_statuses_are_statuses() {
    let host = Host::new();
    let place = host.sandbox("bytes");
    let ran = host.sh(&place, "printf 'a\\000\\377b'; printf e >&2; exit 3");
    assert_eq!((&*ran.stdout, &*ran.stderr), (&b"a\0\xffb"[..], &b"e"[..]));
    assert_eq!(
        (ran.exit.outcome, ran.exit.exit_code, ran.exit.signal),
        (Outcome::UserExit, 3, None)
    );
    let ran = host.sh(&place, "kill -SEGV $$");
    assert_eq!(
        (ran.exit.outcome, ran.exit.exit_code, ran.exit.signal),
        (Outcome::Signal, 139, Some(11))
    );
}

#[test]
fn what_cannot_start_says_why() {
    let host = Host::new();
    let place = host.sandbox("wrong");
    let run = |argv: &[&str], cwd: &str, user: &str| {
        let mut spec = shell("");
        spec.argv = argv.iter().map(|s| (*s).to_owned()).collect();
        spec.cwd = cwd.to_owned();
        spec.user = user.to_owned();
        let ran = host.exec(&place, spec);
        (
            ran.exit.outcome,
            ran.exit.exit_code,
            ran.exit.message.unwrap_or_default(),
        )
    };
    let missing = "No such file or directory (os error 2)";
    assert_eq!(
        run(&["nothing-here"], "", ""),
        (
            Outcome::NotStarted,
            127,
            format!("cannot find `nothing-here`: {missing}")
        )
    );
    assert_eq!(
        run(&["/nothing"], "", ""),
        (
            Outcome::NotStarted,
            127,
            format!("cannot run `/nothing`: {missing}")
        )
    );
    assert_eq!(
        run(&["/etc/passwd"], "", ""),
        (
            Outcome::NotStarted,
            126,
            "cannot run `/etc/passwd`: Permission denied (os error 13)".to_owned()
        )
    );
    assert_eq!(
        run(&["true"], "/no", "").2,
        format!("cannot use working directory `/no`: {missing}")
    );
    assert_eq!(run(&["true"], "", "nobody-here").0, Outcome::NotStarted);
    assert_eq!(run(&["true"], "/tmp", "nobody").0, Outcome::UserExit);
}

#[test]
fn user_folder_and_environment_are_as_asked() {
    let host = Host::new();
    let place = host.sandbox("as-asked");
    let mut spec = shell("id -u; id -g; pwd; echo $A $HOME; ulimit -n; umask; cat");
    spec.user = "nobody".to_owned();
    spec.cwd = "/tmp".to_owned();
    spec.env.insert("A".to_owned(), "ä b".to_owned());
    spec.open_files = 123;
    assert_eq!(
        host.exec(&place, spec).text(),
        "65534\n65534\n/tmp\nä b /nonexistent\n123\n0022\n"
    );
}

/// Mutation: killing the main process only leaves `setsid`'s child and the double fork alive.
#[test]
fn a_timeout_ends_everything_and_keeps_what_was_printed() {
    let host = Host::new();
    let place = host.sandbox("late");
    let marker = format!("9{}7", std::process::id());
    let mut spec = shell(&format!(
        "echo early; sleep {marker} & setsid sleep {marker} & (setsid bash -c 'sleep {marker} & sleep {marker}' &) & wait"
    ));
    spec.timeout_ms = 300;
    let ran = host.exec(&place, spec);
    assert_eq!(
        (ran.exit.outcome, ran.text()),
        (Outcome::TimedOut, "early\n".to_owned())
    );
    assert!(ran.exit.duration_ms >= 300);
    until("nothing is left", || {
        processes_with(&format!("sleep\0{marker}")) == 0
    });
    assert_eq!(host.processes(&place), "3\n");
    // A child that holds the output open does not hold the time-out up.
    let mut spec = shell(&format!("sleep {marker} & echo done; exec sleep {marker}"));
    spec.timeout_ms = 200;
    assert_eq!(host.exec(&place, spec).exit.outcome, Outcome::TimedOut);
}

#[test]
fn an_exec_ends_with_its_main_process_and_after_its_output() {
    let host = Host::new();
    let place = host.sandbox("drain");
    let ran = host.sh(&place, "sleep 1000 & echo done");
    assert_eq!(
        (ran.text(), ran.exit.open_streams),
        ("done\n".to_owned(), true)
    );
    for round in 0..200 {
        let ran = host.sh(&place, "printf x; printf y >&2");
        assert_eq!(
            (&*ran.stdout, &*ran.stderr),
            (&b"x"[..], &b"y"[..]),
            "{round}"
        );
        assert!(!ran.exit.open_streams);
    }
}

#[test]
fn orphans_are_collected_and_everybody_keeps_the_own_status() {
    let host = Host::new();
    let place = host.sandbox("orphans");
    for n in 0..50 {
        let ran = host.sh(&place, &format!("(setsid true &) ; (true &) ; exit {n}"));
        assert_eq!(ran.exit.exit_code, n);
    }
    until("no zombie is left", || {
        host.ok(
            &place,
            "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l",
        ) == "0\n"
    });
}

#[test]
fn kept_output_is_bounded_and_a_stream_is_whole() {
    let host = Host::new();
    let place = host.sandbox("long");
    let line = "head -c 30000000 /dev/zero | tr '\\0' x; printf END";
    let ran = host.sh(&place, line);
    assert_eq!(ran.exit.stdout_bytes, 30_000_003);
    assert_eq!(ran.stdout.len(), HEAD_BYTES_MAX + TAIL_BYTES_MAX);
    assert!(ran.stdout.ends_with(b"xEND"));
    let socket = host.door(&place);
    host.runtime.block_on(async {
        let mut link = Link::connect(&socket).await.unwrap();
        let request = Request::Exec {
            spec: Box::new(shell(line)),
            stream: true,
            resumed: false,
        };
        link.request(&request).await.unwrap();
        let mut next = 0;
        loop {
            match link.next().await.unwrap() {
                Event::Stdout(at, bytes) => {
                    assert_eq!(at, next);
                    next += bytes.len() as u64;
                }
                Event::Exit(exit) => {
                    assert_eq!(exit.stdout_bytes, 30_000_003);
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(next, 30_000_003);
    });
}

#[test]
fn input_of_any_size_arrives() {
    let host = Host::new();
    let place = host.sandbox("input");
    let socket = host.door(&place);
    let data: Vec<u8> = (0..3_000_000_u32)
        .map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3])
        .collect();
    let ran = host.runtime.block_on(async {
        let mut link = Link::connect(&socket).await.unwrap();
        let mut spec = shell("sha256sum; echo over");
        spec.stdin = true;
        let request = Request::Exec {
            spec: Box::new(spec),
            stream: true,
            resumed: false,
        };
        link.request(&request).await.unwrap();
        feed(&mut link, &data).await;
        collect(&mut link).await.unwrap()
    });
    std::fs::write(host.rw("data"), &data).unwrap();
    let sum = std::process::Command::new("sha256sum")
        .arg(host.rw("data"))
        .output()
        .unwrap();
    assert_eq!(
        ran.text().split(' ').next(),
        String::from_utf8(sum.stdout).unwrap().split(' ').next()
    );
    assert!(ran.text().ends_with("over\n"));
}

#[test]
fn a_terminal_is_one_and_has_a_size() {
    let host = Host::new();
    let place = host.sandbox("terminal");
    let socket = host.door(&place);
    host.runtime.block_on(async {
        let mut link = Link::connect(&socket).await.unwrap();
        let mut spec = shell("tty; stty size; read x; echo got $x; stty size");
        spec.exec_id = "pty".to_owned();
        spec.pty = Some(TerminalSize {
            cols: 100,
            rows: 30,
        });
        let request = Request::Exec {
            spec: Box::new(spec),
            stream: true,
            resumed: false,
        };
        link.request(&request).await.unwrap();
        let mut seen = String::new();
        while !seen.contains("30 100\r\n") {
            let Event::Stdout(_, bytes) = link.next().await.unwrap() else {
                panic!()
            };
            seen.push_str(&String::from_utf8(bytes).unwrap());
        }
        assert!(seen.starts_with("/dev/pts/0\r\n"), "{seen}");
        let resize = Request::Resize {
            exec_id: "pty".to_owned(),
            size: TerminalSize { cols: 7, rows: 5 },
        };
        Link::connect(&socket)
            .await
            .unwrap()
            .request(&resize)
            .await
            .unwrap();
        link.send(kind::DATA, b"hello\n").await.unwrap();
        let ran = collect(&mut link).await.unwrap();
        assert!(
            ran.text().ends_with("got hello\r\n5 7\r\n"),
            "{}",
            ran.text()
        );
        assert_eq!(ran.exit.exit_code, 0);
    });
}

/// Mutation: an agent that does not look for the name runs it twice.
#[test]
fn the_same_name_never_runs_twice_and_is_attached_to() {
    let host = Host::new();
    let place = host.sandbox("once");
    let mut spec = shell("echo line >> /root/count; echo out; echo err >&2; exit 4");
    spec.exec_id = "one".to_owned();
    for _ in 0..3 {
        let ran = host.exec(&place, spec.clone());
        assert_eq!((ran.text().as_str(), ran.exit.exit_code), ("out\n", 4));
    }
    assert_eq!(host.ok(&place, "cat /root/count"), "line\n");
    spec.argv[2] = "true".to_owned();
    let other = host.try_exec(&place, spec).unwrap_err();
    assert!(
        matches!(
            other,
            LinkError::Refused {
                failure: Failure::Conflict,
                ..
            }
        ),
        "{other}"
    );
}

#[test]
fn signals_reach_the_main_process_or_all() {
    let host = Host::new();
    let place = host.sandbox("signals");
    let start = |name: &str, line: &str| {
        let mut spec = shell(line);
        spec.exec_id = name.to_owned();
        let request = Request::Exec {
            spec: Box::new(spec),
            stream: false,
            resumed: false,
        };
        assert!(matches!(
            host.ask(&place, &request).unwrap(),
            Answer::Started { again: false, .. }
        ));
    };
    let attach = |name: &str| {
        let socket = host.door(&place);
        host.runtime.block_on(async {
            let mut link = Link::connect(&socket).await.unwrap();
            let request = Request::Attach {
                exec_id: name.to_owned(),
                stdout_from: 0,
                stderr_from: 0,
                stream: false,
            };
            link.request(&request).await.unwrap();
            collect(&mut link).await.unwrap()
        })
    };
    start(
        "term",
        "trap 'echo bye; exit 5' TERM; touch /root/ready; while true; do sleep 0.01; done",
    );
    until("it listens", || {
        host.sh(&place, "ls /root/ready").exit.exit_code == 0
    });
    let signal = |name: &str, signal: i32, tree: bool| {
        host.ask(
            &place,
            &Request::Signal {
                exec_id: name.to_owned(),
                signal,
                tree,
            },
        )
    };
    assert_eq!(signal("term", 15, false).unwrap(), Answer::Ok);
    let ran = attach("term");
    assert_eq!((ran.text().as_str(), ran.exit.exit_code), ("bye\n", 5));
    start("tree", "setsid sleep 1000 & sleep 1000");
    assert_eq!(signal("tree", 9, true).unwrap(), Answer::Ok);
    assert_eq!(attach("tree").exit.signal, Some(9));
    assert!(matches!(
        signal("none", 9, true),
        Err(LinkError::Refused {
            failure: Failure::NotFound,
            ..
        })
    ));
}

#[test]
fn a_sandbox_without_memory_says_so_and_goes_on() {
    let host = Host::new();
    let mut limits = LIMITS;
    limits.memory_bytes = 64 << 20;
    let place = host.sandbox_of("hungry", &["/".into()], &limits);
    let ran = host.python(&place, "x = bytearray(300 << 20)");
    assert_eq!((ran.exit.outcome, ran.exit.exit_code), (Outcome::Oom, 137));
    assert_eq!(host.ok(&place, "echo fine"), "fine\n");
    assert_eq!(host.containers.usage(&place).unwrap().oom_kills, 1);
}

/// Mutations: `pids.max` of 100,000 more; no quota written.
#[test]
fn processes_and_processors_are_as_many_as_asked_for() {
    let host = Host::new();
    let mut limits = LIMITS;
    (limits.pids, limits.cpus) = (40, 1.5);
    let place = host.sandbox_of("limited", &["/".into()], &limits);
    let code = "import os, signal
pids = []
for _ in range(100):
    try: pid = os.fork()
    except BlockingIOError: break
    if pid == 0: signal.pause()
    pids.append(pid)
print(len(pids))
for pid in pids: os.kill(pid, 9)";
    // And the one that counts.
    assert_eq!(host.python(&place, code).text(), "39\n");
    // Not measured in time: what the kernel was told.
    let files = [
        "cpu/*/*/cpu.cfs_quota_us",
        "unified/*/*/cpu.max",
        "*/*/cpu.max",
    ];
    let name = host.cgroup();
    let told = files.iter().flat_map(|file| {
        let line = format!(
            "cat /sys/fs/cgroup/{} 2> /dev/null || :",
            file.replacen("*", &name, 1)
        );
        let ran = std::process::Command::new("sh")
            .args(["-c", &line])
            .output()
            .unwrap();
        let text = String::from_utf8(ran.stdout).unwrap();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    let told: Vec<String> = told.collect();
    let quota = told
        .iter()
        .filter(|line| line.split(' ').next() == Some("150000"));
    assert_eq!(quota.count(), 1, "{told:?}");
}

#[test]
fn a_fork_bomb_hits_the_limit_and_the_sandbox_can_still_be_asked() {
    let host = Host::new();
    let mut limits = LIMITS;
    limits.pids = 40;
    let place = host.sandbox_of("bomb", &["/".into()], &limits);
    let mut spec = shell("for i in $(seq 100); do sleep 1000 & done; wait");
    spec.exec_id = "bomb".to_owned();
    let request = Request::Exec {
        spec: Box::new(spec),
        stream: false,
        resumed: false,
    };
    host.ask(&place, &request).unwrap();
    until("the limit is reached", || {
        host.containers.usage(&place).unwrap().pids >= 40
    });
    let refused = host.try_exec(&place, shell("true"));
    if let Err(error) = &refused {
        assert!(
            matches!(
                error,
                LinkError::Refused {
                    failure: Failure::Exhausted,
                    ..
                }
            ),
            "{error}"
        );
    }
    let kill = Request::Signal {
        exec_id: "bomb".to_owned(),
        signal: 9,
        tree: true,
    };
    assert_eq!(host.ask(&place, &kill).unwrap(), Answer::Ok);
    until("there is room", || {
        host.try_exec(&place, shell("true")).is_ok()
    });
}

#[test]
fn a_paused_sandbox_stands_still_and_goes_on() {
    let host = Host::new();
    let place = host.sandbox("pause");
    let mut spec = shell("while true; do echo x >> /root/ticks; sleep 0.005; done");
    spec.exec_id = "ticks".to_owned();
    host.ask(
        &place,
        &Request::Exec {
            spec: Box::new(spec),
            stream: false,
            resumed: false,
        },
    )
    .unwrap();
    let ticks = host.rw("pause").join("upper/root/ticks");
    let len = || std::fs::metadata(&ticks).map_or(0, |m| m.len());
    until("it ticks", || len() > 0);
    host.containers.pause(&place).unwrap();
    let at = len();
    assert_eq!(
        host.ask(&place, &Request::Ping).unwrap(),
        Answer::Ok,
        "the agent is not paused"
    );
    assert_eq!(len(), at);
    host.containers.resume(&place).unwrap();
    until("it ticks again", || len() > at);
}
