//! Runs parts of a test program in the test VM (`tools/testvm`, docs/testvm.md), for what this machine's kernel cannot do.
//!
//! The program runs itself again in the VM, which sees the same files. One VM serves many tests, because it costs seconds to
//! start; how many ran there is compared with how many should have, so that none is skipped.
#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "support of tests fails by panicking and says why, as tests do"
)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A test of a [`suite`]: its name and what it does.
pub type Test = (&'static str, fn());

/// Names one test of a [`suite`] that is to run alone.
const ONLY: &str = "DSEC_VM_TEST";

/// Whether this process is in the VM.
pub fn inside() -> bool {
    std::env::var_os("DSEC_IN_VM").is_some()
}

/// `tools/testvm` of this repository.
pub fn tool() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.join("../../tools/testvm")
}

/// `tools/testvm run` with `arguments`.
///
/// # Panics
/// When it cannot be started.
pub fn run(arguments: &[&str]) -> Output {
    Command::new(tool())
        .arg("run")
        .args(arguments)
        .output()
        .expect("tools/testvm can be started")
}

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!(
        "{}\n{}",
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(err)
    )
}

fn program() -> String {
    let program = std::env::current_exe().expect("a program knows where it is");
    program.to_str().expect("a path in UTF-8").to_owned()
}

/// Called by the test `name` with the tests that must run in the VM: outside, it runs this program there with that one test and
/// checks that all of them were run; in the VM, it runs them one after the other.
/// `DSEC_VM_TEST=NAME` runs one of them only, and then fails, because the others did not run.
///
/// # Panics
/// When a test fails or does not run, with what it said.
pub fn suite(name: &str, options: &[&str], tests: &[Test]) {
    if inside() {
        return run_all(tests);
    }
    let program = program();
    let mut arguments = options.to_vec();
    arguments.extend(["--", &program, name, "--exact", "--nocapture"]);
    let output = run(&arguments);
    let text = text(&output);
    println!("{text}");
    assert!(
        output.status.success(),
        "the tests in the VM failed: {}",
        output.status
    );
    for (test, _) in tests {
        let line = format!("vm: ok {test}");
        assert!(
            text.lines().any(|l| l == line),
            "`{test}` did not run in the VM"
        );
    }
}

fn run_all(tests: &[Test]) {
    let only = std::env::var(ONLY).ok();
    let mut failed = Vec::new();
    for (name, test) in tests {
        if only.as_deref().is_some_and(|only| only != *name) {
            continue;
        }
        println!("vm: run {name}");
        if catch_unwind(AssertUnwindSafe(test)).is_ok() {
            println!("vm: ok {name}");
        } else {
            println!("vm: FAILED {name}");
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "failed in the VM: {failed:?}");
}

/// Runs the tests of this program that `filters` name in the VM, one after the other, with `variables` (`NAME=VALUE`), and checks
/// that exactly `count` passed.
///
/// # Panics
/// When it is another number, with what they said.
pub fn filtered(options: &[&str], variables: &[&str], filters: &[&str], count: usize) {
    let program = program();
    let mut arguments = options.to_vec();
    arguments.extend(["--", "env"]);
    arguments.extend(variables);
    arguments.push(&program);
    arguments.extend(filters);
    arguments.push("--test-threads=1");
    let output = run(&arguments);
    let text = text(&output);
    println!("{text}");
    let expected = format!("test result: ok. {count} passed; 0 failed; 0 ignored;");
    assert!(
        output.status.success() && text.contains(&expected),
        "expected `{expected}` of the tests in the VM"
    );
}
