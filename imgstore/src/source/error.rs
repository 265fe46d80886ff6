//! Why a source could not be read.

use std::io;
use std::path::PathBuf;

/// Why a source could not be turned into a tree. Nothing is ever left out instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The host refused.
    #[error("could not {what} `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The refusal.
        #[source]
        source: io::Error,
    },
    /// A file is not what it was when the tree was read.
    #[error("`{}` changed while it was read: {how}; build from a copy or a snapshot that nothing writes to", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What differs.
        how: &'static str,
    },
    /// A content could not be read.
    #[error(transparent)]
    Content(#[from] super::content::ContentError),
    /// A directory that contains itself (through a bind mount).
    #[error("`{}` contains itself through a mount; unmount the inner one", .0.display())]
    Loop(PathBuf),
    /// The layer format cannot hold this.
    #[error("`{path}`: {what} is not supported: expected {expected}, found {found}")]
    Unsupported {
        /// The path in the tree.
        path: String,
        /// The attribute.
        what: &'static str,
        /// What would be accepted, and what to do.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// The archive's own structure is damaged or unknown.
    #[error("archive `{archive}`, entry at byte {offset}: {fault}")]
    Archive {
        /// The archive.
        archive: String,
        /// Where the entry starts in the uncompressed archive.
        offset: u64,
        /// What is wrong.
        #[source]
        fault: TarFault,
    },
    /// An entry cannot be placed into the tree.
    #[error("archive `{archive}`, entry `{path}`: {fault}")]
    Entry {
        /// The archive.
        archive: String,
        /// The entry's path.
        path: String,
        /// What is wrong.
        #[source]
        fault: EntryFault,
    },
    /// Reading the archive failed.
    #[error("could not read archive `{archive}` near byte {offset}: {source}")]
    ArchiveRead {
        /// The archive.
        archive: String,
        /// How far the uncompressed archive was read.
        offset: u64,
        /// The failure; of the decompressor too.
        #[source]
        source: io::Error,
    },
    /// It unpacks to far more than honest archives do.
    #[error(
        "archive `{archive}` expands too much: expected at most 1 GiB or {ratio} times its compressed size, found more than {plain} bytes out of {compressed}; if it is right, decompress it first and pass the plain archive"
    )]
    Expansion {
        /// The archive.
        archive: String,
        /// Plain bytes so far.
        plain: u64,
        /// Compressed bytes so far.
        compressed: u64,
        /// The limit.
        ratio: u64,
    },
    /// A compression this code does not read.
    #[error(
        "`{archive}` is compressed with {found}; expected plain, gzip or zstd: decompress it and pass it as `-`"
    )]
    Compression {
        /// The archive.
        archive: String,
        /// What its first bytes say.
        found: &'static str,
    },
    /// A blob of an image is not what its digest says.
    #[error(
        "{what} `{blob}` of image `{image}` is damaged: expected {expected}, found {found}; copy the image again"
    )]
    Blob {
        /// The image.
        image: String,
        /// The blob's role.
        what: &'static str,
        /// The blob's name.
        blob: String,
        /// Digest or size that was promised.
        expected: String,
        /// What is there.
        found: String,
    },
    /// An image's structure is damaged or of an unknown kind.
    #[error("image `{image}`: {what}: {found}")]
    Image {
        /// The image.
        image: String,
        /// What was looked for.
        what: &'static str,
        /// What is there.
        found: String,
    },
    /// The name does not single out one image.
    #[error("`{image}` holds {found} for {wanted}; choose one: {choices}")]
    Choice {
        /// The image directory or archive.
        image: String,
        /// How many fit.
        found: &'static str,
        /// What was asked for.
        wanted: String,
        /// What there is.
        choices: String,
    },
    /// An upper directory that only makes sense together with its lowers.
    #[error("`{path}` has `{xattr}`: its content or name lies in a lower layer; {advice}")]
    Overlay {
        /// The path in the upper.
        path: String,
        /// The attribute.
        xattr: String,
        /// What to do.
        advice: &'static str,
    },
}

impl SourceError {
    pub(crate) fn io(
        path: impl Into<PathBuf>,
        what: &'static str,
        e: impl Into<io::Error>,
    ) -> Self {
        Self::Io {
            path: path.into(),
            what,
            source: e.into(),
        }
    }

    pub(super) fn unsupported(
        path: &[u8],
        what: &'static str,
        expected: &'static str,
        found: impl ToString,
    ) -> Self {
        Self::Unsupported {
            path: shown(path),
            what,
            expected,
            found: found.to_string(),
        }
    }
}

/// What is wrong with the framing of a tar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TarFault {
    /// The archive stops inside an entry.
    #[error("the archive is cut off: expected {expected} more bytes, found {found}")]
    Truncated {
        /// Bytes that had to follow.
        expected: u64,
        /// Bytes that did.
        found: u64,
    },
    /// No bytes at all.
    #[error("the archive is empty (0 bytes): expected at least its end blocks")]
    Empty,
    /// The checksum is wrong: not a tar, or a damaged one.
    #[error("not a tar header: expected checksum {expected}, found {found}")]
    Checksum {
        /// As the field says.
        expected: String,
        /// As computed.
        found: u64,
    },
    /// One block of zeros and then something else.
    #[error("a single block of zeros is followed by other bytes: expected two at the end")]
    LoneZeroBlock,
    /// A field that is not a number.
    #[error("header field `{field}` is not a number: found `{found}`")]
    Number {
        /// The field.
        field: &'static str,
        /// Its bytes.
        found: String,
    },
    /// A number that does not fit.
    #[error("`{field}` is out of range: expected {expected}, found {found}")]
    Range {
        /// The field.
        field: &'static str,
        /// The range.
        expected: &'static str,
        /// The number.
        found: String,
    },
    /// An entry type that is not known.
    #[error("entry type `{0}` is not supported")]
    Type(String),
    /// Extended headers larger than any real one.
    #[error("extended header of {found} bytes: expected at most {max}")]
    ExtendedHeader {
        /// Its size.
        found: u64,
        /// The limit.
        max: u64,
    },
    /// Extended headers that no entry follows.
    #[error("extended headers are followed by no entry")]
    Dangling,
    /// A damaged PAX record.
    #[error("PAX record `{record}`: {what}")]
    Pax {
        /// The record's key or beginning.
        record: String,
        /// What is wrong.
        what: &'static str,
    },
    /// A damaged sparse map.
    #[error("sparse map: {0}")]
    Sparse(&'static str),
}

/// Why an entry cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryFault {
    /// `..`, an empty path or a NUL: never followed, never guessed.
    #[error("unsafe path: {0}")]
    UnsafePath(&'static str),
    /// A parent is a file.
    #[error("`{0}` is not a directory, so nothing can be placed in it")]
    ParentNotDirectory(String),
    /// Parents that are symbolic links in a circle.
    #[error("more than 40 symbolic links in the path")]
    SymlinkLoop,
    /// More inodes than any layer can have.
    #[error("more than 16777216 inodes: expected at most as many as a layer can hold")]
    TooMany,
    /// The root must stay a directory.
    #[error("the root can only be a directory")]
    RootNotDirectory,
    /// A hard link to nothing.
    #[error("hard link to `{0}`, which is in no entry and no lower layer")]
    MissingLinkTarget(String),
    /// A hard link to a directory.
    #[error("hard link to `{0}`, which is a directory")]
    LinkToDirectory(String),
    /// `.wh.` with nothing or dots behind it.
    #[error("whiteout of no valid name")]
    Whiteout,
    /// An ACL that cannot be turned into numbers.
    #[error(
        "ACL entry `{0}` names no numeric id: make the tar with `--xattrs --xattrs-include='*'` or `--numeric-owner`"
    )]
    Acl(String),
}

/// A path as it is shown in messages: bytes that are not UTF-8 or not printable are escaped.
pub(crate) fn shown(path: &[u8]) -> String {
    match std::str::from_utf8(path) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => path.escape_ascii().to_string(),
    }
}
