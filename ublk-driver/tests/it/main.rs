//! Devices of the ublk driver, on a kernel that has ublk: in the test VM. One test starts the VM and runs all of them there.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

mod contents;
mod deaths;
mod disks;
mod images;
mod lives;
mod shell;

use std::time::Duration;

/// Set for a process that only serves, to be killed: the file, and what becomes of the device.
pub(crate) const SERVE: &str = "DSEC_TEST_SERVE";

#[test]
fn devices_in_the_vm() {
    if let Ok(what) = std::env::var(SERVE) {
        return deaths::serve(&what);
    }
    test_vm::suite(
        "devices_in_the_vm",
        // Cycles take their time in tools/soak.
        &[
            "-t",
            if std::env::var_os("DSEC_UBLK_CYCLES").is_some() {
                "1700"
            } else {
                "280"
            },
        ],
        &[
            ("probing", lives::probing),
            ("cycles", lives::add_and_remove_leave_nothing),
            ("many", lives::many_at_once_serve_their_own_bytes),
            ("erofs", images::an_erofs_image_is_mounted_and_equal),
            (
                "partitions",
                images::partitions_are_looked_for_only_where_wanted,
            ),
            (
                "answers",
                images::answers_that_are_wrong_late_or_missing_are_errors,
            ),
            (
                "in use",
                images::a_device_in_use_is_not_removed_and_by_force_it_is,
            ),
            (
                "hanging",
                images::a_read_that_is_never_answered_does_not_hold_up_removal,
            ),
            ("ext4", disks::a_file_system_is_made_used_and_found_again),
            ("verify", disks::what_is_written_at_random_is_read_back),
            ("zeros", disks::discards_and_zeros_are_exact),
            ("durable", disks::flushes_and_forced_writes_reach_the_disk),
            ("errors", disks::errors_reach_the_caller),
            ("recovery", deaths::a_killed_server_is_replaced_under_load),
            (
                "failing",
                deaths::without_recovery_a_killed_server_is_an_error_at_once,
            ),
            (
                "leftovers",
                deaths::what_a_dead_server_leaves_is_found_and_deleted,
            ),
        ],
    );
}

/// Without a control device the answer is at hand, and says what to do.
#[test]
fn a_machine_without_ublk_says_why() {
    if std::path::Path::new("/dev/ublk-control").exists() {
        assert_eq!(ublk_driver::probe(), Ok(()));
        return;
    }
    let error = ublk_driver::Driver::start(0).unwrap_err().to_string();
    assert!(error.contains("modprobe ublk_drv"), "{error}");
    assert_eq!(ublk_driver::devices().unwrap(), []);
}

/// Longest wait for anything that must happen.
pub(crate) const SOON: Duration = Duration::from_secs(30);
