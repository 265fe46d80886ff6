//! How the library should misbehave: lines of a file in the mount, read anew at every call, so that a test can steer a library
//! in another process.

use std::fs;
use std::path::Path;

use crate::holes::Lost;

/// The file, below the mount point.
pub const FILE: &str = "3fs-virt/stand-in";

/// What the file says. Without it the library behaves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Control {
    /// `reverse`: of the reads that are submitted together, the last finishes first.
    pub reverse: bool,
    /// `early`: a read is done and finished when it is prepared.
    pub early: bool,
    /// `hold N`: the next N reads are not done, until the line is gone: then at the end of whatever call comes next.
    pub hold: usize,
    /// `result R`: every read gives this.
    pub result: Option<i64>,
    /// `cut N`: every read gives so many bytes less.
    pub cut: i64,
    /// `capacity N`: the ring is full with so many reads under way.
    pub capacity: Option<usize>,
    /// `twice`: every read finishes twice.
    pub twice: bool,
    /// `foreign`: every read finishes as one that nobody knows.
    pub foreign: bool,
    /// `fail CALL ERRNO`: the call fails.
    pub fail: Vec<(String, i32)>,
    /// `lost NAME CHUNK KEEP`: of the file with this last part of its name, a chunk is lost but for its first bytes.
    pub lost: Vec<(String, Lost)>,
}

impl Control {
    /// Reads the file of a mount.
    pub fn read(mount: &Path) -> Self {
        let mut out = Self::default();
        let text = fs::read_to_string(mount.join(FILE)).unwrap_or_default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| words[at].parse::<i64>().unwrap();
            let size = |at: usize| words[at].parse::<usize>().unwrap();
            match words[0] {
                "reverse" => out.reverse = true,
                "early" => out.early = true,
                "twice" => out.twice = true,
                "foreign" => out.foreign = true,
                "hold" => out.hold = size(1),
                "result" => out.result = Some(number(1)),
                "cut" => out.cut = number(1),
                "capacity" => out.capacity = Some(size(1)),
                "fail" => out
                    .fail
                    .push((words[1].to_owned(), i32::try_from(number(2)).unwrap())),
                "lost" => out.lost.push((
                    words[1].to_owned(),
                    Lost {
                        chunk: u64::try_from(number(2)).unwrap(),
                        keep: u64::try_from(number(3)).unwrap(),
                    },
                )),
                other => panic!("`{other}` in {FILE}"),
            }
        }
        out
    }

    /// Writes the file of a mount. In one step: the library may read it at any time.
    pub fn write(mount: &Path, lines: &[&str]) {
        let file = mount.join(FILE);
        let tmp = file.with_extension("tmp");
        fs::write(&tmp, lines.join("\n")).unwrap();
        fs::rename(tmp, file).unwrap();
    }

    /// The error that this call should give.
    pub fn failure(&self, call: &str) -> Option<i32> {
        let mut fail = self.fail.iter();
        fail.find(|(name, _)| name == call).map(|(_, errno)| *errno)
    }
}
