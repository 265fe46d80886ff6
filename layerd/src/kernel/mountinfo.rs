//! `/proc/self/mountinfo`, parsed.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// Where.
    pub(crate) path: PathBuf,
    /// Type of the file system.
    pub(crate) kind: String,
    /// What the file system calls its source.
    pub(crate) source: PathBuf,
}

/// All mounts of this mount namespace, oldest first: of several at one path, the last one is seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct MountInfo {
    mounts: Vec<Mounted>,
    /// Index of the last one at each path: a host has thousands, and each is asked for at a restart.
    seen: HashMap<OsString, usize>,
}

/// Octal escapes (`\040`) back to bytes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail
            .get(..3)
            .filter(|d| *first == b'\\' && d.iter().all(|b| matches!(b, b'0'..=b'7')));
        match digits {
            Some(digits) => {
                let value = digits
                    .iter()
                    .fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0'));
                out.push(u8::try_from(value).unwrap_or(b'?'));
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

impl MountInfo {
    /// As it is now.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub(crate) fn read() -> io::Result<Self> {
        std::fs::read("/proc/self/mountinfo").map(|text| Self::parse(&text))
    }

    fn parse(text: &[u8]) -> Self {
        let line = |line: &[u8]| {
            let mut fields = line.split(|b| *b == b' ');
            let path = unescape(fields.nth(4)?);
            let mut after = fields.skip_while(|f| *f != b"-").skip(1);
            let kind = String::from_utf8_lossy(after.next()?).into_owned();
            let source = unescape(after.next()?);
            Some(Mounted { path, kind, source })
        };
        let mounts: Vec<Mounted> = text.split(|b| *b == b'\n').filter_map(line).collect();
        let names = mounts.iter().map(|m| m.path.clone().into_os_string());
        let seen = names.zip(0..).collect();
        Self { mounts, seen }
    }

    /// What is seen at `path`, if it is a mount point.
    pub(crate) fn at(&self, path: &Path) -> Option<&Mounted> {
        let at = self.seen.get(path.as_os_str())?;
        self.mounts.get(*at)
    }

    /// Everything mounted below `folder` (or at it), the innermost and latest first: the order to unmount in.
    pub(crate) fn below(&self, folder: &Path) -> Vec<&Mounted> {
        let inside = |m: &&Mounted| m.path.starts_with(folder);
        self.mounts.iter().rev().filter(inside).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_and_without_optional_fields_and_escapes_are_understood() {
        let text = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n\
            37 36 0:40 / /a\\040b/c ro - fuse.dsec dsec ro\n\
            38 36 0:41 / /a\\040b/c ro - erofs /x\\134y ro\n";
        let info = MountInfo::parse(text);
        assert_eq!(info.at(Path::new("/mnt2")).unwrap().kind, "ext3");
        let seen = info.at(Path::new("/a b/c")).unwrap();
        assert_eq!(
            (&*seen.kind, seen.source.as_path()),
            ("erofs", Path::new("/x\\y"))
        );
        let kinds: Vec<&str> = info
            .below(Path::new("/a b"))
            .iter()
            .map(|m| &*m.kind)
            .collect();
        assert_eq!(kinds, ["erofs", "fuse.dsec"]);
        assert!(info.at(Path::new("/a")).is_none());
    }

    #[test]
    fn the_real_file_has_a_root() {
        assert!(MountInfo::read().unwrap().at(Path::new("/")).is_some());
    }
}
