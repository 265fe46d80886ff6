//! Which extended attributes go into a layer. One list, applied alike to every source, so that digests agree.
//!
//! | attribute | what happens |
//! |---|---|
//! | `user.*` (also `user.overlay.*`), `trusted.*`, `security.*` not listed here, `system.posix_acl_access`, `system.posix_acl_default` | kept |
//! | [`DROPPED`]: labels and measurements of the host, ACL views of network file systems, settings of the file system | dropped, unless named in `keep_xattrs` |
//! | `trusted.overlay.*` in a directory, tar or image | escaped by one level to `trusted.overlay.overlay.*`: it is data of a file, and OverlayFS shows it under its own name when the layer is a lower |
//! | `trusted.overlay.*` in an `upper:` source, or in a tar that `dsec export` made | `opaque`, an empty `origin` and escaped ones as stored: they speak to OverlayFS; others are an error |
//! | anything else | an error that names it: EROFS has no place for it |
//!
//! `user.overlay.*` means something only to mounts with `userxattr`, which layers are never mounted with.

use super::SourceError;
use crate::tree::Meta;

/// Names that are dropped by default; a trailing `*` stands for any rest.
pub const DROPPED: [&str; 20] = [
    // Labels and measurements made by the host's security modules for the host's files.
    "security.selinux",
    "security.ima",
    "security.evm",
    "security.apparmor",
    "security.SMACK64*",
    // Views of ACLs and states that network and cluster file systems synthesise.
    "system.nfs4_acl",
    "system.nfs4_dacl",
    "system.nfs4_sacl",
    "system.richacl",
    "system.cifs_acl",
    "system.smb3_acl*",
    "system.smb3_ntsd*",
    "system.ntfs_*",
    "lustre.*",
    "trusted.lov",
    "trusted.glusterfs.*",
    "ceph.*",
    // Settings of the file system and of another operating system.
    "btrfs.*",
    "bcachefs*",
    "com.apple.*",
];

/// What `trusted.overlay.*` means in a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OverlayXattrs {
    /// Data of files.
    Escape,
    /// Marks for OverlayFS, and data already escaped.
    AsStored,
}

/// The filter of one load.
#[derive(Debug)]
pub(super) struct XattrFilter<'a> {
    keep: &'a [String],
}

const OVERLAY: &[u8] = b"trusted.overlay.";

impl<'a> XattrFilter<'a> {
    pub(super) const fn new(keep: &'a [String]) -> Self {
        Self { keep }
    }

    fn drops(&self, name: &[u8]) -> bool {
        let kept = self.keep.iter().any(|keep| keep.as_bytes() == name);
        !kept && DROPPED.iter().any(|pattern| matches(pattern, name))
    }

    /// Drops, escapes and checks the attributes of the inode at `path`.
    pub(super) fn apply(
        &self,
        meta: &mut Meta,
        path: &[u8],
        overlay: OverlayXattrs,
    ) -> Result<(), SourceError> {
        let raw = std::mem::take(&mut meta.xattrs);
        for (name, value) in raw {
            if self.drops(&name) {
                continue;
            }
            if !is_storable(&name) {
                return Err(SourceError::unsupported(
                    path,
                    "extended attribute",
                    "user.*, trusted.*, security.*, system.posix_acl_access or system.posix_acl_default; remove it from the source",
                    super::error::shown(&name),
                ));
            }
            if overlay == OverlayXattrs::AsStored && !is_layer_mark(&name, &value) {
                return Err(SourceError::unsupported(
                    path,
                    "overlay attribute",
                    "trusted.overlay.opaque = `y`, an empty trusted.overlay.origin, or an escaped trusted.overlay.overlay.*",
                    super::error::shown(&name),
                ));
            }
            let name = match (overlay, name.strip_prefix(OVERLAY)) {
                (OverlayXattrs::Escape, Some(rest)) => {
                    [OVERLAY, b"overlay.".as_slice(), rest].concat()
                }
                _ => name,
            };
            meta.xattrs.insert(name, value);
        }
        Ok(())
    }
}

/// Whether a layer may hold it: no overlay attribute but the marks that [`super::upper`] leaves, and escaped ones. Others
/// would make OverlayFS look elsewhere for names and contents.
fn is_layer_mark(name: &[u8], value: &[u8]) -> bool {
    match name.strip_prefix(OVERLAY) {
        None => true,
        Some(b"opaque") => value == b"y",
        Some(b"origin") => value.is_empty(),
        Some(rest) => rest.starts_with(b"overlay."),
    }
}

fn matches(pattern: &str, name: &[u8]) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start.as_bytes()),
        None => name == pattern.as_bytes(),
    }
}

/// Whether EROFS has a name index for it; a prefix needs something behind it.
fn is_storable(name: &[u8]) -> bool {
    let prefixed = ["user.", "trusted.", "security."]
        .iter()
        .any(|prefix| name.starts_with(prefix.as_bytes()) && name.len() > prefix.len());
    prefixed || name == b"system.posix_acl_access" || name == b"system.posix_acl_default"
}
