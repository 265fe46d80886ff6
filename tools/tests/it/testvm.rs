//! The test VM keeps its promises: status, output, isolation, shares, power cuts, kernel trouble.

use std::fs;
use std::process::Command;

fn run(options: &[&str], script: &str) -> (Option<i32>, String, String) {
    let mut arguments = options.to_vec();
    arguments.extend(["--", "sh", "-c", script]);
    let out = test_vm::run(&arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

#[test]
fn a_job_in_the_vm_says_what_it_says_and_writes_nothing_here() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("seen"), "from the host\n").unwrap();
    let script = format!(
        "cat {0}/seen; echo to stderr >&2; echo x > {0}/written; cat {0}/written; id -u; exit 7",
        dir.path().display()
    );
    let (status, out, err) = run(&[], &script);
    assert_eq!(
        (status, &*out, &*err),
        (Some(7), "from the host\nx\n0\n", "to stderr\n")
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn two_jobs_in_the_vm_at_once_do_not_meet_and_draw_different_numbers() {
    let script = "ls /run/tmp; echo mine > /run/tmp/mine; od -An -tx1 -N16 /dev/urandom";
    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| run(&[], script));
        let b = scope.spawn(|| run(&[], script));
        (a.join().unwrap(), b.join().unwrap())
    });
    assert_eq!((a.0, b.0), (Some(0), Some(0)), "{} {}", a.2, b.2);
    assert_eq!(a.1.len(), 16 * 3 + 1, "only the numbers: {}", a.1);
    assert_ne!(a.1, b.1);
}

#[test]
fn what_the_vm_writes_to_shares_and_disks_is_here_after_a_power_cut() {
    let dir = tempfile::tempdir().unwrap();
    let (share, disk) = (dir.path().join("share"), dir.path().join("disk"));
    fs::create_dir(&share).unwrap();
    let file = fs::File::create(&disk).unwrap();
    file.set_len(1 << 20).unwrap();
    let (share, disk) = (share.to_str().unwrap(), disk.to_str().unwrap());
    let script = format!(
        "echo shared > {share}/file && printf on-disk | dd of=/dev/vda conv=fsync status=none && echo cut here && sleep 100"
    );
    let options = ["--share", share, "--disk", disk, "--cut-at", "cut here"];
    let (status, out, err) = run(&options, &script);
    assert_eq!((status, &*out), (Some(0), "cut here\n"), "{err}");
    let shared = fs::read_to_string(dir.path().join("share/file")).unwrap();
    assert_eq!(shared, "shared\n");
    assert_eq!(fs::read(disk).unwrap()[..7], *b"on-disk");
}

#[test]
fn a_job_in_the_vm_that_is_late_or_ends_before_its_cut_or_breaks_the_kernel_is_a_failure() {
    let cases: [(&[&str], &str, &str); 3] = [
        (&["-t", "1"], "sleep 100", "did not end within 1.0 s"),
        (&["--cut-at", "never"], "exit 3", "never said `never`"),
        (
            &[],
            "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger",
            "Kernel panic",
        ),
    ];
    for (options, script, expected) in cases {
        let (status, _, err) = run(options, script);
        assert_eq!(status, Some(125), "{script}: {err}");
        assert!(err.contains(expected), "{script}: {err}");
    }
}

#[test]
fn without_a_test_vm_a_run_fails_and_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new(test_vm::tool())
        .args(["run", "--", "true"])
        .env("DSEC_TESTVM", dir.path())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(125));
    let err = String::from_utf8(out.stderr).unwrap();
    assert!(err.contains("run `tools/testvm setup`"), "{err}");
}
