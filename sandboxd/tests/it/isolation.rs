//! The agent inside is root and an adversary: what it tries, and what it gets.

use std::os::unix::fs::MetadataExt;

use sandboxd::backend::Backend as _;
use sandboxd::container::protocol::{Answer, Request};

use crate::host::{Host, shell, until};

/// Tries a list of things and prints a line each: its name, and the error number it got (0: it worked).
const PROBE: &str = r#"
import ctypes, errno, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    args = [a if isinstance(a, (bytes, type(None))) else ctypes.c_long(a) for a in args]
    if libc.syscall(ctypes.c_long(number), *args) < 0:
        raise OSError(ctypes.get_errno(), 'x')
def attempt(name, what):
    try:
        what()
        print(name, 'worked')
    except OSError as e:
        print(name, errno.errorcode[e.errno])
"#;

fn probe(attempts: &str) -> String {
    let mut code = PROBE.to_owned();
    for line in attempts.lines().filter(|line| !line.trim().is_empty()) {
        let (name, what) = line.trim().split_once(' ').unwrap();
        code.push_str(&format!("attempt('{name}', lambda: {what})\n"));
    }
    code
}

/// Mutation: without the filter, new user and mount namespaces work, and others get another errno.
#[test]
fn escapes_fail() {
    let host = Host::new();
    let place = host.sandbox("adversary");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let attempts = format!(
        "mount call(165, b'none', b'/mnt', b'tmpfs', 0, 0)
        umount call(166, b'/proc', 2)
        fsopen call(430, b'tmpfs', 0)
        open_tree call(428, -100, b'/', 1)
        move_mount call(429, -100, b'/proc', -100, b'/mnt', 0)
        mount_setattr call(442, -100, b'/', 0, b'0' * 32, 32)
        pivot_root call(155, b'/', b'/')
        user_namespace call(272, 0x10000000)
        mount_namespace call(272, 0x20000)
        clone_namespace call(56, 0x10000000 | 17, 0, 0, 0, 0)
        clone3 call(435, 0, 0)
        setns call(308, os.open('/proc/self/ns/mnt', 0), 0)
        keyctl call(250, 0, -3, 0)
        add_key call(248, b'user', b'a', b'b', 1, -3)
        bpf call(321, 0, b'0' * 64, 64)
        perf_event_open call(298, b'0' * 112, 0, -1, -1, 0)
        userfaultfd call(323, 1)
        io_uring call(425, 1, b'0' * 120)
        init_module call(175, b'', 0, b'')
        kexec call(246, 0, 0, 0, 0)
        open_by_handle call(304, 3, b'0' * 32, 0)
        reboot call(169, 0xfee1dead, 672274793, 0x1234567)
        settime call(227, 0, b'0' * 16)
        swapon call(167, b'/x', 0)
        quotactl call(179, 0x80000700, b'/dev/vda', 0, b'0' * 64)
        fake_input call(16, 0, 0x5412, b'x')
        xfs_swapext call(16, 0, 0xc0c0586d, b'0' * 192)
        xfs_exchange call(16, 0, 0x40285881, b'0' * 40)
        freeze_disk call(16, os.open('/', 0), 0xc0045877, 0)
        trace_agent call(101, 16, 1, 0, 0)
        trace_launcher call(101, 16, 2, 0, 0)
        agent_memory open('/proc/1/mem', 'rb')
        agent_files os.listdir('/proc/1/fd')
        agent_root os.readlink('/proc/1/root')
        agent_program os.readlink('/proc/1/exe')
        agent_environment open('/proc/1/environ').read()
        disk os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))
        memory_device os.mknod('/tmp/mem', 0o20600, os.makedev(1, 1))
        core_pattern open('/proc/sys/kernel/core_pattern', 'w')
        sysfs open('/sys/new', 'w')
        device_folder open('/dev/new', 'w')
        vsock socket.socket(40, 1)
        packet socket.socket(17, 3)
        crypto socket.socket(38, 5)
        hosts_port socket.create_connection(('127.0.0.1', {port}), 5)
        internet socket.create_connection(('1.1.1.1', 53), 5)
        hostname socket.sethostname('x')
        lower_nice os.nice(-1)
        foreign_owner os.chown('/tmp', 65536, 0)"
    );
    let ran = host.python(&place, &probe(&attempts));
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.exit.exit_code, 0, "{errors}");
    let expected = "mount EPERM,umount EPERM,fsopen EPERM,open_tree EPERM,move_mount EPERM,mount_setattr EPERM,\
        pivot_root EPERM,user_namespace EPERM,mount_namespace EPERM,clone_namespace EPERM,clone3 ENOSYS,setns EPERM,\
        keyctl EPERM,add_key EPERM,bpf EPERM,perf_event_open EPERM,userfaultfd EPERM,io_uring EPERM,init_module EPERM,\
        kexec EPERM,open_by_handle EPERM,reboot EPERM,settime EPERM,swapon EPERM,quotactl EPERM,fake_input EPERM,\
        xfs_swapext EPERM,xfs_exchange EPERM,freeze_disk EPERM,trace_agent EPERM,trace_launcher EPERM,\
        agent_memory EACCES,agent_files EACCES,agent_root EACCES,agent_program EACCES,agent_environment EACCES,\
        disk EPERM,memory_device EPERM,core_pattern EROFS,sysfs EROFS,device_folder EROFS,\
        vsock EAFNOSUPPORT,packet EAFNOSUPPORT,crypto EAFNOSUPPORT,hosts_port ECONNREFUSED,internet ENETUNREACH,\
        hostname EPERM,lower_nice EPERM,foreign_owner EINVAL";
    let got: Vec<String> = ran.text().lines().map(str::to_owned).collect();
    let expected: Vec<&str> = expected.split(',').map(str::trim).collect();
    assert_eq!(got, expected);
}

/// Mutation: each kind of namespace left out where shells are made.
#[test]
fn a_sandbox_is_a_machine_of_its_own() {
    let host = Host::new();
    let place = host.sandbox("alone");
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let path = format!("/proc/self/ns/{kind}");
        let theirs = host.ok(&place, &format!("readlink {path}"));
        let ours = std::fs::read_link(&path).unwrap();
        assert!(theirs.starts_with(&format!("{kind}:[")), "{theirs}");
        assert_ne!(theirs.trim_end(), ours.to_str().unwrap());
    }
    assert_eq!(host.ok(&place, "hostname"), "alone\n");
    assert_eq!(host.ok(&place, "id -u; id -g; id -G"), "0\n0\n0\n");
    assert_eq!(host.processes(&place), "3\n");
    assert_eq!(host.ok(&place, "ls /sys/class/net"), "lo\n");
    assert_eq!(
        host.ok(
            &place,
            "grep -c ^dsec /proc/mounts; wc -l < /proc/sysvipc/shm"
        ),
        "1\n1\n"
    );
    assert_eq!(
        host.ok(
            &place,
            "cat /proc/self/cgroup | grep -v ^0: | cut -d: -f3 | sort -u"
        ),
        "/\n"
    );
    // Its root is what was composed, and no chroot leads out of it.
    let out = "import os
os.mkdir('/cage'); open('/marker', 'w').close()
fd = os.open('/', 0); os.chroot('/cage'); os.fchdir(fd)
for _ in range(50): os.chdir('..')
os.chroot('.'); print(os.path.exists('/marker'), os.path.ismount('/proc'))";
    let ran = host.python(&place, out);
    assert_eq!(ran.text(), "True True\n");
    assert!(!std::fs::exists("/marker").unwrap());
}

/// Mutations: each name missing in its list (of those that the tests' machine has, `sysrq-trigger` not among them); no hidden folders.
#[test]
fn what_tells_about_the_host_is_hidden() {
    let host = Host::new();
    let place = host.sandbox("blind");
    for file in [
        "kcore",
        "kallsyms",
        "kpagecgroup",
        "kpagecount",
        "kpageflags",
        "keys",
        "key-users",
        "kmsg",
        "latency_stats",
        "sched_debug",
        "timer_list",
        "timer_stats",
        "interrupts",
        "softirqs",
        "vmallocinfo",
        "slabinfo",
        "pagetypeinfo",
    ] {
        if std::fs::exists(format!("/proc/{file}")).unwrap() {
            assert_eq!(
                host.ok(&place, &format!("wc -c < /proc/{file}")),
                "0\n",
                "{file}"
            );
            // Keys are of a user namespace, where there are none: their files would be empty without us.
            let line = format!("awk '$2 == \"/proc/{file}\"' /proc/mounts | wc -l");
            assert_eq!(host.ok(&place, &line), "1\n", "{file}");
        }
    }
    let all = "/sys/kernel /sys/fs /sys/firmware /sys/module /sys/power /sys/hypervisor /sys/devices/virtual/powercap \
        /proc/acpi /proc/asound /proc/scsi /proc/driver";
    let there = |path: &&str| std::fs::exists(path).unwrap();
    for folder in all.split_whitespace().filter(there) {
        assert_eq!(
            host.ok(&place, &format!("ls -A {folder} | wc -l")),
            "0\n",
            "{folder}"
        );
    }
    for name in ["acpi", "asound", "scsi", "driver"] {
        if std::fs::exists(format!("/proc/{name}")).unwrap() {
            let line = format!("awk '$2 == \"/proc/{name}\" {{ print $3 }}' /proc/mounts");
            assert_eq!(host.ok(&place, &line), "tmpfs\n", "{name}");
        }
    }
    // Looked up, not tried: it would be this machine's.
    for name in ["bus", "fs", "irq", "sys", "sysrq-trigger"] {
        if !std::fs::exists(format!("/proc/{name}")).unwrap() {
            continue;
        }
        let line =
            format!("awk '$2 == \"/proc/{name}\" {{ print substr($4, 1, 3) }}' /proc/mounts");
        assert_eq!(host.ok(&place, &line), "ro,\n", "{name}");
    }
    let line = host.ok(&place, "tr '\\0' ' ' < /proc/1/cmdline");
    assert_eq!(line, "sandbox --spawner ");
}

#[test]
fn capabilities_and_privileges_are_few() {
    let host = Host::new();
    let place = host.sandbox("weak");
    let status = host.ok(
        &place,
        "grep -E 'Cap(Prm|Eff|Bnd|Amb|Inh)|NoNewPrivs|Seccomp:' /proc/self/status",
    );
    assert_eq!(host.ok(&place, "ulimit -Hc"), "0\n", "core dumps");
    let values: Vec<&str> = status.split_whitespace().collect();
    assert_eq!(values[1], "0000000000000000", "inheritable");
    assert_eq!(
        (values[3], values[5], values[7]),
        ("00000000800405fb", "00000000800405fb", "00000000800405fb")
    );
    assert_eq!(
        &values[8..],
        [
            "CapAmb:",
            "0000000000000000",
            "NoNewPrivs:",
            "1",
            "Seccomp:",
            "2"
        ]
    );
}

#[test]
fn each_sandbox_has_ids_of_its_own_and_the_disk_has_the_images() {
    let host = Host::new();
    let (one, two) = (host.sandbox("one"), host.sandbox("two"));
    for (name, place) in [("one", &one), ("two", &two)] {
        host.ok(
            place,
            "touch /root/mine; chown 7:9 /root/mine; rm /etc/hostname",
        );
        let mut spec = shell("exec sleep 1000");
        spec.argv[2] = format!("exec -a {name}-sleeps sleep 1000");
        spec.exec_id = "sleep".to_owned();
        let request = Request::Exec {
            spec: Box::new(spec),
            stream: false,
            resumed: false,
        };
        assert!(matches!(
            host.ask(place, &request).unwrap(),
            Answer::Started { .. }
        ));
    }
    let owner = |name: &str| -> u32 {
        let mut found = None;
        until("the process is there", || {
            let pids = std::fs::read_dir("/proc").unwrap().flatten();
            let mine = |e: &std::fs::DirEntry| {
                let line = std::fs::read(e.path().join("cmdline")).unwrap_or_default();
                line.starts_with(format!("{name}-sleeps").as_bytes())
            };
            found = pids
                .into_iter()
                .find(|e| mine(e))
                .map(|e| std::fs::metadata(e.path()).unwrap().uid());
            found.is_some()
        });
        found.unwrap()
    };
    let base = 1 << 30;
    assert_eq!(owner("one"), base + one.slot * 65_536);
    assert_eq!(owner("two"), base + two.slot * 65_536);
    assert_ne!(one.slot, two.slot);
    // Nothing of this is written on the host's side of the layer, and owners on disk are the image's.
    let mine = std::fs::metadata(host.rw("one").join("upper/root/mine")).unwrap();
    assert_eq!((mine.uid(), mine.gid()), (7, 9));
    let gone = std::fs::symlink_metadata(host.rw("one").join("upper/etc/hostname")).unwrap();
    assert_eq!((gone.rdev(), gone.mode() & 0o170_000), (0, 0o020_000));
}

#[test]
fn an_image_cannot_redirect_what_is_mounted_into_it() {
    let host = Host::new();
    let layer = host.dir.path().join("layer");
    std::fs::create_dir_all(layer.join("etc")).unwrap();
    std::os::unix::fs::symlink("/etc", layer.join("proc")).unwrap();
    let limits = crate::host::LIMITS;
    let refused = host.containers.create(&sandboxd::backend::Plan {
        layers: &["/".into(), layer],
        rw: &host.rw("rw"),
        hostname: "x",
        limits: &limits,
        patience: crate::host::SOON,
    });
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("use folder `/proc`"), "{message}");
}

#[test]
fn nothing_inside_has_a_part_in_control() {
    let host = Host::new();
    let place = host.sandbox("hollow");
    host.ok(&place, "cp /usr/bin/python3.11 /root/py; printf '#!/root/py\\nprint(666)\\n' > /root/evil; chmod 755 /root/evil
        for f in bash dash ls cat env python3.11 ps; do ln -f /root/evil /usr/bin/$f; done");
    let ran = host.sh(&place, "echo mine");
    assert_eq!(ran.text(), "666\n", "what is asked for runs");
    let mut spec = shell("");
    spec.argv = ["/root/py", "-c", "print(1 + 1)"]
        .map(str::to_owned)
        .to_vec();
    assert_eq!(host.exec(&place, spec).text(), "2\n");
    assert_eq!(host.ask(&place, &Request::Ping).unwrap(), Answer::Ok);
}

/// Mutation: without the time-out of the launcher's answer, the exec after SIGSTOP is never answered.
#[test]
fn killing_and_stopping_everything_inside_leaves_control() {
    let host = Host::new();
    let place = host.sandbox("massacre");
    let ran = host.sh(
        &place,
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1; echo alive",
    );
    assert_eq!(ran.text(), "alive\n");
    assert_eq!(host.ok(&place, "echo back"), "back\n");
    let ran = host.python(
        &place,
        "import os, signal, glob
for p in glob.glob('/proc/[0-9]*'):
    pid = int(p[6:])
    if pid not in (1, os.getpid()): os.kill(pid, signal.SIGSTOP)
print('stopped')",
    );
    assert_eq!(ran.text(), "stopped\n");
    assert_eq!(host.ok(&place, "echo again"), "again\n");
    // The second launcher is under the limits as well.
    assert_eq!(
        host.ok(
            &place,
            "grep -E ':(memory|pids|cpu):' /proc/self/cgroup | cut -d: -f3 | sort -u"
        ),
        "/\n"
    );
}
