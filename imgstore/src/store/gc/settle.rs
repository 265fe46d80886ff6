//! How long an origin may show an old state.
//!
//! A local file system, and a service with read-after-write consistency, shows everybody the newest state at once. On a
//! 3FS mount other clients see stale names and attributes for 30 s. Two hosts that each write and then read can miss each
//! other by twice that: the one may read 30 s into the past, and so may the other.

use std::path::Path;
use std::time::Duration;

/// What a collector waits on a 3FS mount between its announcement and its second look: twice the 30 s, and some.
pub const THREE_FS: Duration = Duration::from_secs(65);

/// What the file system of `path` needs.
pub fn of_dir(path: &Path) -> Duration {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    match file_system(&table, &path) {
        Some("fuse.hf3fs") => THREE_FS,
        _ => Duration::ZERO,
    }
}

/// The type of the file system that `path` is on: that of the last mount at the longest prefix of it.
fn file_system<'a>(mountinfo: &'a str, path: &Path) -> Option<&'a str> {
    let mut best: Option<(usize, &str)> = None;
    for line in mountinfo.lines() {
        let Some((place, rest)) = line.split_once(" - ") else {
            continue;
        };
        let (Some(point), Some(kind)) = (place.split(' ').nth(4), rest.split(' ').next()) else {
            continue;
        };
        let len = point.len();
        if path.starts_with(unescape(point)) && best.is_none_or(|(longest, _)| len >= longest) {
            best = Some((len, kind));
        }
    }
    best.map(|(_, kind)| kind)
}

/// The kernel writes blanks, tabs, line ends and backslashes as three octal digits.
fn unescape(text: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n")];
    let plain = codes
        .iter()
        .fold(text.to_owned(), |t, (code, c)| t.replace(code, c));
    plain.replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_decides() {
        let table = "22 1 8:1 / / rw - ext4 /dev/a rw\n\
                     30 22 0:40 / /mnt/3fs rw,nosuid shared:4 - fuse.hf3fs hf3fs.test rw\n\
                     31 30 0:41 / /mnt/3fs/in\\040side rw - tmpfs none rw\n\
                     nonsense\n";
        let of = |path: &str| file_system(table, Path::new(path));
        assert_eq!(of("/srv/layers"), Some("ext4"));
        assert_eq!(of("/mnt/3fs"), Some("fuse.hf3fs"));
        assert_eq!(of("/mnt/3fs/layers"), Some("fuse.hf3fs"));
        assert_eq!(of("/mnt/3fs2"), Some("ext4"));
        assert_eq!(of("/mnt/3fs/in side/x"), Some("tmpfs"));
        assert_eq!(file_system("", Path::new("/")), None);
    }
}
