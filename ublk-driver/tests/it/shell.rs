//! Commands, and waiting.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::SOON;

/// Runs a shell command that must succeed; what it prints.
pub(crate) fn sh(script: &str) -> String {
    let out = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(
        out.status.success(),
        "`{script}`: {}\n{}{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

/// Waits until `check` says yes.
pub(crate) fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !check() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Device nodes of the driver.
pub(crate) fn nodes() -> Vec<String> {
    let names = std::fs::read_dir("/dev").unwrap();
    let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut nodes: Vec<_> = names
        .filter(|n| n.starts_with("ublkb") || n.starts_with("ublkc"))
        .collect();
    nodes.sort();
    nodes
}

/// Reads past the page cache.
pub(crate) fn read_direct(path: &Path, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(path)?;
    // Aligned by hand: a block more than is needed.
    let mut buffer = vec![0; len + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    file.read_exact_at(&mut buffer[skip..skip + len], offset)?;
    Ok(buffer[skip..skip + len].to_vec())
}

/// Writes past the page cache.
pub(crate) fn write_direct(
    path: &Path,
    offset: u64,
    bytes: &[u8],
    flags: i32,
) -> std::io::Result<()> {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    let file = std::fs::File::options()
        .write(true)
        .custom_flags(nix::libc::O_DIRECT | flags)
        .open(path)?;
    let mut buffer = vec![0; bytes.len() + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    buffer[skip..skip + bytes.len()].copy_from_slice(bytes);
    file.write_all_at(&buffer[skip..skip + bytes.len()], offset)
}
