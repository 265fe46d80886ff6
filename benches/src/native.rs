//! `native-mount`: what `dsec mount` does, with local EROFS files. A process of its own, so that both pay for
//! starting one.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::mounts::{self, Backing, Mounted};
use crate::workdir::WorkDir;

/// Mounts local EROFS image files, lowest first, as `dsec mount` mounts layers.
#[derive(Debug, clap::Args)]
pub(crate) struct NativeMountArgs {
    /// Image files, lowest first.
    #[arg(required = true)]
    images: Vec<PathBuf>,
    /// Where the root file system appears.
    #[arg(long)]
    at: PathBuf,
    /// One empty folder per image, for the images' own mounts, where they are composed.
    #[arg(long)]
    lowers: Option<PathBuf>,
    /// Empty folder of the writable layer; read-only without.
    #[arg(long)]
    upper: Option<PathBuf>,
    /// Go through the page cache of the image files.
    #[arg(long)]
    buffered: bool,
}

/// Mounts and leaves the mounts standing.
///
/// # Errors
/// Where a mount fails; what was mounted before is taken down again.
pub(crate) fn run(args: &NativeMountArgs) -> Result<()> {
    let backing = if args.buffered {
        Backing::Buffered
    } else {
        Backing::Direct
    };
    let mut made = Vec::new();
    match (&args.lowers, &args.upper, args.images.as_slice()) {
        (Some(lowers), Some(upper), images) => {
            let mut folders = Vec::new();
            for (index, image) in images.iter().enumerate() {
                let folder = lowers.join(index.to_string());
                made.push(mounts::erofs(image, &folder, backing)?);
                folders.insert(0, folder);
            }
            made.push(mounts::overlay(&folders, upper, &args.at)?);
        }
        (_, _, [image]) => made.push(mounts::erofs(image, &args.at, backing)?),
        _ => {
            let text = "several images need --lowers and --upper".to_owned();
            return Err(Error::Unexpected(text));
        }
    }
    made.into_iter().for_each(std::mem::forget);
    Ok(())
}

/// The mounts that `native-mount` left, and how it is called.
#[derive(Debug)]
pub(crate) struct NativeRoot {
    pub(crate) at: PathBuf,
    /// Where each image is mounted, lowest first.
    pub(crate) layers: Vec<PathBuf>,
    upper: Option<PathBuf>,
    lowers: PathBuf,
}

impl NativeRoot {
    /// Makes the folders for `count` images below `scratch`.
    ///
    /// # Errors
    /// Where they cannot be made.
    pub(crate) fn prepare(work: &WorkDir, count: usize, rw: bool) -> Result<Self> {
        let at = work.folder("scratch/root")?;
        let lowers = work.folder("scratch/lowers")?;
        let upper = if rw {
            Some(work.folder("scratch/upper")?)
        } else {
            None
        };
        let layers = match rw {
            false => vec![at.clone()],
            true => (0..count)
                .map(|index| work.folder(&format!("scratch/lowers/{index}")))
                .collect::<Result<_>>()?,
        };
        Ok(Self {
            at,
            layers,
            upper,
            lowers,
        })
    }

    /// Arguments of `native-mount`.
    pub(crate) fn arguments(&self, images: &[PathBuf]) -> Vec<std::ffi::OsString> {
        let mut arguments = vec!["native-mount".into()];
        arguments.extend(images.iter().map(Into::into));
        arguments.extend(["--at".into(), (&self.at).into()]);
        if let Some(upper) = &self.upper {
            arguments.extend([
                "--lowers".into(),
                (&self.lowers).into(),
                "--upper".into(),
                upper.into(),
            ]);
        }
        arguments
    }

    /// Takes over the mounts, so that they are taken down with the result, the topmost first.
    pub(crate) fn adopt(&self) -> Vec<Mounted> {
        let composed = self.upper.as_ref().map(|_| Mounted::adopt(&self.at));
        composed
            .into_iter()
            .chain(self.layers.iter().map(|layer| Mounted::adopt(layer)))
            .collect()
    }
}

/// The own program, which carries `native-mount` and `get`.
///
/// # Errors
/// Where `/proc` does not tell.
pub(crate) fn own_program() -> Result<PathBuf> {
    use crate::error::Context;
    std::env::current_exe().during("finding the own program")
}
