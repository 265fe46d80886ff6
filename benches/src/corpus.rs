//! The corpus: real trees from Debian, PyPI and npm, each made once by a shell script, and their archives.
//!
//! A tree stands under `trees/NAME` only when it is whole. Beside it the bench keeps what the eager and whole
//! ways download: `NAME.tar.gz`, `NAME.tar.zst` and `NAME.erofs.zst`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::{Context, Result};
use crate::say::progress;
use crate::workdir::WorkDir;

/// The scripts, carried in the binary so that it runs from anywhere.
const SCRIPTS: [(&str, &str); 6] = [
    ("make-tree.sh", include_str!("../corpus/make-tree.sh")),
    ("lib.sh", include_str!("../corpus/lib.sh")),
    ("bases.sh", include_str!("../corpus/bases.sh")),
    ("workspaces.sh", include_str!("../corpus/workspaces.sh")),
    ("toolkits.sh", include_str!("../corpus/toolkits.sh")),
    ("images.sh", include_str!("../corpus/images.sh")),
];

/// A form in which a tree is downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    TarGz,
    TarZst,
    ErofsZst,
}

impl Form {
    pub(crate) const fn extension(self) -> &'static str {
        match self {
            Self::TarGz => "tar.gz",
            Self::TarZst => "tar.zst",
            Self::ErofsZst => "erofs.zst",
        }
    }

    /// The line of bash that makes it: `$1` is the tree, `$2` the result, `$3` a scratch file.
    const fn recipe(self) -> &'static str {
        match self {
            Self::TarGz => {
                "tar --sort=name --xattrs --numeric-owner -C \"$1\" -cf - . | gzip -6 -n >\"$2\""
            }
            Self::TarZst => {
                "tar --sort=name --xattrs --numeric-owner -C \"$1\" -cf - . | zstd -q -3 -T0 >\"$2\""
            }
            Self::ErofsZst => {
                "mkfs.erofs --quiet -U 00000000-0000-0000-0000-000000000000 \"$3\" \"$1\" >/dev/null
                 zstd -q -3 -T0 <\"$3\" >\"$2\"
                 rm \"$3\""
            }
        }
    }
}

/// Makes a tree unless it is there, and returns where it is.
///
/// # Errors
/// Where the script fails: no network, or a program that it needs is missing.
pub(crate) fn ensure_tree(work: &WorkDir, name: &str) -> Result<PathBuf> {
    let tree = work.tree(name);
    if tree.try_exists().on("look for", &tree)? {
        return Ok(tree);
    }
    progress!("making {name} from packages …");
    let scripts = work.folder("scripts")?;
    for (file, text) in SCRIPTS {
        let path = scripts.join(file);
        std::fs::write(&path, text).on("write", &path)?;
    }
    command::run(
        Command::new("bash")
            .arg(scripts.join("make-tree.sh"))
            .arg(work.root())
            .arg(name),
    )?;
    Ok(tree)
}

/// Makes an archive or image of a tree unless it is there, and returns where it is.
///
/// # Errors
/// Where the tree or the archive cannot be made.
pub(crate) fn ensure_artifact(work: &WorkDir, tree: &str, form: Form) -> Result<PathBuf> {
    let name = format!("{tree}.{}", form.extension());
    let artifact = work.artifact(&name);
    if artifact.try_exists().on("look for", &artifact)? {
        return Ok(artifact);
    }
    let source = ensure_tree(work, tree)?;
    progress!("making {name} …");
    work.folder("artifacts")?;
    let unfinished = work.artifact(&format!("{name}.new"));
    let scratch = work.artifact(&format!("{name}.scratch"));
    command::shell(
        form.recipe(),
        &[
            source.as_os_str(),
            unfinished.as_os_str(),
            scratch.as_os_str(),
        ],
    )?;
    std::fs::rename(&unfinished, &artifact).on("rename", &unfinished)?;
    Ok(artifact)
}

/// Notes the length of a tree's plain tar beside its archives, once.
///
/// # Errors
/// Where the archive cannot be read.
pub(crate) fn ensure_tar_size(work: &WorkDir, tree: &str) -> Result<()> {
    let path = work.artifact(&format!("{tree}.tar.bytes"));
    if !path.try_exists().on("look for", &path)? {
        let source = ensure_tree(work, tree)?;
        let line = "tar --sort=name --xattrs --numeric-owner -C \"$1\" -cf - . | wc -c";
        let len = command::shell(line, &[source.as_os_str()])?;
        std::fs::write(&path, len).on("write", &path)?;
    }
    Ok(())
}

/// Length of a file in bytes.
///
/// # Errors
/// Where there is none.
pub(crate) fn file_len(path: &Path) -> Result<u64> {
    Ok(std::fs::metadata(path).on("look at", path)?.len())
}
