//! Published layers below a disk: layerd mounts them in the disk's folder while somebody reads the disk.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use imgstore::disk::folder::Lower;
use imgstore::disk::published::PublishedDisk;
use imgstore::disk::state::{self, DISK_FILE, Form, LOWERS};
use imgstore::ids::{Digest, LayerRef};
use layerd_client::api::{MountRequest, MountState};
use layerd_client::client::Client;

use crate::commands::Failure;
use crate::output;

/// Published layers of a disk, bottom to top.
fn published(folder: &Path) -> Result<Vec<(Digest, Form)>, Failure> {
    let state = state::read_state(folder)?;
    let of = |lower: &Lower| match lower {
        Lower::Published { layer, form } => Some((*layer, *form)),
        Lower::Lsmt(_) | Lower::Raw(_) | Lower::Pair(_) => None,
    };
    Ok(state.layers.iter().filter_map(of).collect())
}

fn mountpoint(folder: &Path, layer: &Digest) -> PathBuf {
    folder.join(LOWERS).join(layer.to_hex())
}

/// Mounts one layer where the disk looks for it, unless it is there and alive.
pub(super) fn mount(
    folder: &Path,
    client: &Client,
    (layer, form): (Digest, Form),
) -> Result<(), Failure> {
    let at = mountpoint(folder, &layer);
    // A dead mount is there and cannot be looked at.
    match fs::create_dir_all(&at) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => {}
    }
    let mounts = client.mounts()?.mounts;
    let alive = |mount: &layerd_client::api::Mount| {
        mount.mountpoint == at && mount.state == MountState::Alive
    };
    if !mounts.iter().any(alive) {
        client.mount(&MountRequest {
            refs: vec![layer.to_hex()],
            mountpoint: at.clone(),
            rw: false,
            trace: None,
            no_trace: false,
        })?;
    }
    if form == Form::Image {
        let image = source_of(&at)?;
        let link = folder.join(Lower::published_path(&layer, form));
        let new = link.with_extension("new");
        drop(fs::remove_file(&new));
        std::os::unix::fs::symlink(&image, &new)?;
        fs::rename(new, link)?;
    }
    Ok(())
}

/// What a published layer means for a disk over it: the layers, bottom to top.
pub(super) fn of_published(
    folder: &Path,
    client: &Client,
    reference: &LayerRef,
) -> Result<Vec<(Digest, Form)>, Failure> {
    let at = folder.join(LOWERS).join("look");
    fs::create_dir_all(&at)?;
    let mounted = client.mount(&MountRequest {
        refs: vec![reference.to_string()],
        mountpoint: at.clone(),
        rw: false,
        trace: None,
        no_trace: true,
    })?;
    let looked = look(&at, &mounted.layers);
    client.umount(&at)?;
    fs::remove_dir(&at)?;
    looked
}

fn look(at: &Path, layers: &[String]) -> Result<Vec<(Digest, Form)>, Failure> {
    let [layer] = layers else {
        return Err(format!("expected one layer, found {}", layers.len()).into());
    };
    let layer: Digest = layer.parse()?;
    let about = at.join(PublishedDisk::FILE);
    if !at.join(DISK_FILE).is_file() || !about.is_file() {
        return Ok(vec![(layer, Form::Image)]);
    }
    let mut bytes = Vec::new();
    let file = fs::File::open(&about)?;
    file.take(PublishedDisk::BYTES_MAX)
        .read_to_end(&mut bytes)?;
    let parsed = PublishedDisk::parse(&bytes, &about.display().to_string())?;
    let parents = parsed
        .parents
        .iter()
        .map(|parent| (parent.layer, parent.form));
    Ok(parents.chain([(layer, Form::Disk)]).collect())
}

/// Takes what was mounted for the disk away.
pub(super) fn unmount(folder: &Path, client: &Client, layers: &[(Digest, Form)]) {
    for (layer, _) in layers {
        if let Err(error) = client.umount(&mountpoint(folder, layer)) {
            output::note(&format!("a layer below the disk stays mounted: {error}"));
        }
    }
}

/// Does something while the published layers below a disk are mounted.
pub(super) fn with_mounted<T>(
    folder: &Path,
    socket: &Path,
    run: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let layers = published(folder)?;
    if layers.is_empty() {
        return run();
    }
    let client = Client::new(socket);
    let mounted = layers
        .iter()
        .try_for_each(|layer| mount(folder, &client, *layer));
    let done = mounted.and_then(|()| run());
    // Not while another process serves the disk from them.
    if !state::is_held(folder)? {
        unmount(folder, &client, &layers);
    }
    done
}

/// What is mounted at a place: for a layer of layerd, the file with its whole image.
fn source_of(mountpoint: &Path) -> Result<PathBuf, Failure> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let wanted = mountpoint.canonicalize()?;
    // The last one at a place is the one that is seen.
    let found = text.lines().rev().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let at = unescape(mount.split(' ').nth(4)?);
        (Path::new(&at) == wanted).then(|| unescape(source.split(' ').nth(1).unwrap_or_default()))
    });
    found
        .map(PathBuf::from)
        .ok_or_else(|| format!("`{}` was mounted and is not any more", mountpoint.display()).into())
}

/// Takes the kernel's octal escapes out of a field of `mountinfo`.
fn unescape(field: &str) -> String {
    let mut out = field.to_owned();
    for (code, plain) in [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ] {
        out = out.replace(code, plain);
    }
    out
}
