//! Does this kernel read layers right? Asked once at start, with a tiny built-in layer that has one of everything.
//!
//! A version number does not tell: defects come and go with patches. So the image goes the way of every layer, through the
//! data plane and EROFS, and what comes out is compared with what was put in: contents, holes, names, links, times, attributes.
//! layerd does not serve where something differs. It costs a few milliseconds and neither origin nor cache.

mod image;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use imgstore::ids::Digest;
use imgstore::store::cache::names::{MANIFEST, META};
use imgstore::tree::{InodeId, Kind};

use super::link::{LinkError, PlaneLink};
use crate::driver::Driver;
use crate::kernel::mount::{self, MountError};
use crate::kill::step;
use crate::paths::Paths;
use crate::protocol::{Provenance, ToData};
pub(crate) use image::Addressing;
use image::TestImage;

/// Bytes at the end of a large file that are read; the rest of it is a hole.
const TAIL_BYTES: u64 = 8192;
/// Longest value of an attribute in the image.
const XATTR_BYTES_MAX: usize = 1024;

/// Why the self-test was not passed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SelfTestError {
    #[error(
        "Linux {release} reads layers wrong, so layerd does not serve on it: `{path}` of the built-in test image: expected {expected}; found {found}. Use another kernel, and report this one"
    )]
    Differs {
        release: String,
        path: String,
        expected: String,
        found: String,
    },
    #[error(
        "Linux {release} cannot mount layers as layerd does (through FUSE it needs 6.13 or newer; `--driver ublk` less): {source}"
    )]
    Mount {
        release: String,
        #[source]
        source: MountError,
    },
    #[error("self-test: {0}")]
    Link(#[from] LinkError),
    #[error("self-test: cannot {what} `{path}`: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl SelfTestError {
    /// Whether it only could not be made, for want of disk space or the like: that says nothing about the kernel.
    pub(crate) const fn is_inconclusive(&self) -> bool {
        matches!(self, Self::Io { .. })
    }

    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}

fn release() -> String {
    rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned()
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct SelfTest {
    layer: Digest,
    image: TestImage,
}

impl SelfTest {
    pub(crate) fn new(addressing: Addressing) -> Self {
        let image = TestImage::new(addressing);
        Self {
            layer: image.manifest.layer(),
            image,
        }
    }

    /// The image's name among layers.
    pub(crate) const fn layer(&self) -> Digest {
        self.layer
    }

    /// Gives the data plane segments that it needs.
    pub(crate) fn give(&self, plane: &PlaneLink, indexes: &[usize]) {
        for part in indexes.iter().filter_map(|i| self.image.parts.get(*i)) {
            let from = Provenance {
                origin: "the self-test".to_owned(),
                pack: self.layer,
                offset: 0,
            };
            let digest = part.digest;
            let cost = None;
            plane.send(
                &ToData::Frame {
                    digest,
                    from,
                    cost,
                    traced: None,
                },
                &part.frame,
            );
        }
    }

    /// Mounts the image and compares; how long that took. Nothing is left behind.
    ///
    /// # Errors
    /// Says what the kernel reads wrong, or why that cannot be told.
    pub(crate) fn run(
        &self,
        paths: &Paths,
        plane: &PlaneLink,
        directio: bool,
    ) -> Result<Duration, SelfTestError> {
        let started = Instant::now();
        let folder = paths.layer(&self.layer);
        let target = paths.layer_mount(&self.layer);
        let outcome = self.mount_and_compare(paths, plane, directio);
        if let Err(error) = mount::umount(&target).or_else(|_| mount::detach(&target)) {
            tracing::debug!(%error, "the self-test was not mounted");
        }
        let removed = [fs::remove_dir(&target), fs::remove_dir_all(&folder)];
        for error in removed.into_iter().filter_map(Result::err) {
            tracing::debug!(%error, "nothing of the self-test to remove");
        }
        if let Err(error) = plane.remove_image(self.layer) {
            tracing::warn!(%error, "the self-test's image is still served");
        }
        outcome.map(|()| started.elapsed())
    }

    fn mount_and_compare(
        &self,
        paths: &Paths,
        plane: &PlaneLink,
        directio: bool,
    ) -> Result<(), SelfTestError> {
        let folder = paths.layer(&self.layer);
        fs::create_dir_all(&folder).map_err(SelfTestError::io("create", &folder))?;
        let manifest = self.image.manifest.to_bytes();
        for (name, bytes) in [(MANIFEST, &manifest), (META, &self.image.meta)] {
            let path = folder.join(name);
            fs::write(&path, bytes).map_err(SelfTestError::io("write", &path))?;
        }
        let target = paths.layer_mount(&self.layer);
        fs::create_dir_all(&target).map_err(SelfTestError::io("create", &target))?;
        step("the self-test's files are there");
        let source = plane
            .add_uncounted_image(self.layer)?
            .unwrap_or_else(|| paths.fuse().join(self.layer.to_hex()));
        mount::erofs(&source, &target, directio && plane.driver == Driver::Fuse).map_err(
            |source| SelfTestError::Mount {
                release: release(),
                source,
            },
        )?;
        self.compare(&target)
    }

    fn compare(&self, target: &Path) -> Result<(), SelfTestError> {
        let links = self.image.tree.link_counts();
        for (path, id) in self.image.tree.walk() {
            let name = String::from_utf8_lossy(&path).into_owned();
            let expected = self.expected(id, links.get(&id).copied().unwrap_or(1));
            let found = self
                .found(&target.join(&name), id)
                .unwrap_or_else(|error| error.to_string());
            if found != expected {
                return Err(SelfTestError::Differs {
                    release: release(),
                    path: name,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }

    /// Everything about an inode in one line.
    fn expected(&self, id: InodeId, links: u32) -> String {
        let inode = self.image.tree.inode(id);
        let meta = &inode.meta;
        let mut out = format!(
            "mode {:o}, owner {}:{}, time {}.{:09}",
            inode.mode(),
            meta.uid,
            meta.gid,
            meta.mtime.sec,
            meta.mtime.nsec
        );
        let content = match &inode.kind {
            Kind::File(content) => {
                let from = tail_start(content.len);
                let bytes = self.image.content(id, from, content.len);
                let data = if from > 0 { self.data_starts(id) } else { 0 };
                format!(
                    ", {} bytes, links {links}, data from {data}, {}",
                    content.len,
                    Digest::of(&bytes)
                )
            }
            Kind::Dir(entries) => list(entries.keys().map(Vec::as_slice)),
            Kind::Symlink(to) => format!(", to {}", String::from_utf8_lossy(to)),
            Kind::Char(major, minor) | Kind::Block(major, minor) => {
                format!(", device {}", rustix::fs::makedev(*major, *minor))
            }
            Kind::Fifo | Kind::Socket => String::new(),
        };
        out.push_str(&content);
        for (name, value) in &meta.xattrs {
            describe_xattr(&mut out, &String::from_utf8_lossy(name), value);
        }
        out
    }

    /// Where the data of a file with a large hole starts.
    fn data_starts(&self, id: InodeId) -> u64 {
        let map = self.image.maps.get(&id);
        let first = map.and_then(|map| Some((map, map.chunks.iter().position(Option::is_some)?)));
        first.map_or(0, |(map, at)| {
            (imgstore::ids::to_u64(at) << map.chunk_bits) * 4096
        })
    }

    /// The same line, from the kernel.
    fn found(&self, path: &Path, id: InodeId) -> io::Result<String> {
        let meta = fs::symlink_metadata(path)?;
        let mut out = format!(
            "mode {:o}, owner {}:{}, time {}.{:09}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec()
        );
        let inode = self.image.tree.inode(id);
        let content = match &inode.kind {
            Kind::File(_) => {
                let file = File::open(path)?;
                let from = tail_start(meta.len());
                let mut bytes = vec![0; imgstore::ids::to_usize(meta.len() - from)];
                file.read_exact_at(&mut bytes, from)?;
                let data = if from > 0 {
                    match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0))? {
                        // Before 6.13 EROFS knows of no holes: all is data, which is true enough.
                        0 => self.data_starts(id),
                        start => start,
                    }
                } else {
                    0
                };
                format!(
                    ", {} bytes, links {}, data from {data}, {}",
                    meta.len(),
                    meta.nlink(),
                    Digest::of(&bytes)
                )
            }
            Kind::Dir(_) => {
                let entries =
                    fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().as_bytes().to_vec()));
                let mut names = entries.collect::<io::Result<Vec<_>>>()?;
                names.sort_unstable();
                list(names.iter().map(Vec::as_slice))
            }
            Kind::Symlink(_) => format!(", to {}", fs::read_link(path)?.display()),
            Kind::Char(..) | Kind::Block(..) => format!(", device {}", meta.rdev()),
            Kind::Fifo | Kind::Socket => String::new(),
        };
        out.push_str(&content);
        for name in inode.meta.xattrs.keys() {
            let name = String::from_utf8_lossy(name);
            let mut value = vec![0; XATTR_BYTES_MAX];
            let len = rustix::fs::lgetxattr(path, &*name, &mut value)?;
            describe_xattr(&mut out, &name, value.get(..len).unwrap_or_default());
        }
        Ok(out)
    }
}

/// Where the part of a file that is compared starts.
const fn tail_start(len: u64) -> u64 {
    if len > 1 << 20 { len - TAIL_BYTES } else { 0 }
}

fn list<'a>(names: impl Iterator<Item = &'a [u8]>) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut count = 0;
    for name in names {
        count += 1;
        hasher.update(name);
        hasher.update(b"/");
    }
    format!(", {count} names, {}", Digest::from(hasher.finalize()))
}

fn describe_xattr(out: &mut String, name: &str, value: &[u8]) {
    write!(out, ", {name} {}", Digest::of(value)).expect("a String takes all text");
}

/// Runs the self-test for a data plane that was just started or adopted.
///
/// # Errors
/// When layerd must not serve.
pub(crate) fn check(
    test: &SelfTest,
    paths: &Paths,
    plane: &PlaneLink,
    directio: bool,
) -> Result<Option<Duration>, SelfTestError> {
    match test.run(paths, plane, directio) {
        Ok(took) => {
            tracing::info!(
                milliseconds = took.as_millis(),
                "self-test passed: the kernel reads layers right"
            );
            Ok(Some(took))
        }
        Err(error) if error.is_inconclusive() => {
            tracing::error!(%error, "the self-test could not be made; serving all the same");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

    use super::*;

    /// Mutation: without the comparison, an empty folder is the image.
    #[test]
    fn the_first_thing_that_differs_is_named_with_what_was_expected() {
        let test = SelfTest::new(Addressing::Flat);
        let folder = tempfile::tempdir().unwrap();
        let differs = || match test.compare(folder.path()).unwrap_err() {
            SelfTestError::Differs {
                path,
                expected,
                found,
                ..
            } => (path, expected, found),
            other => panic!("{other}"),
        };
        let (path, expected, found) = differs();
        assert_eq!(path, "");
        assert!(
            expected.starts_with("mode 41777, owner 70000:80000, time -5.123456789, 13 names"),
            "{expected}"
        );
        assert!(
            found.contains("owner 0:0") && found.contains(" 0 names"),
            "{found}"
        );
        // The same attributes and names, and nothing in the files.
        for name in [
            "device",
            "empty",
            "holes",
            "jumps",
            "large",
            "link",
            "long-link",
        ] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        for name in [
            "many",
            "pipe",
            "small",
            "small-again",
            "touching",
            "whiteout",
        ] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        chown(folder.path(), Some(70_000), Some(80_000)).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let time = Timespec {
            tv_sec: -5,
            tv_nsec: 123_456_789,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        utimensat(CWD, folder.path(), &times, AtFlags::empty()).unwrap();
        assert_eq!(differs().0, "device");
    }
}
