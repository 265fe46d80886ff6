//! Parsers of what users import: archives, images, upper directories.

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use imgstore::source::{self, Loaded, SourceError, SourceOptions, SourceSpec};
use sha2::{Digest as _, Sha256};

use super::Target;
use super::targets::told;
use crate::source_tar_damage::fix_checksums;
use crate::tar_bytes::{dir, entry, file, link, pax, symlink, tar as archive};

fn options() -> SourceOptions {
    SourceOptions::new(std::env::temp_dir())
}

fn load(bytes: &[u8]) -> Result<Loaded, SourceError> {
    let loaded = source::load_tar_stream(bytes, "input", &options())?;
    drop(loaded.tree.walk());
    Ok(loaded)
}

fn fix_tar(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    fix_checksums(bytes);
}

fn archives() -> Vec<Vec<u8>> {
    let xattr: (&[u8], &[u8]) = (b"SCHILY.xattr.user.a", b"v");
    let old_sparse = {
        let mut sparse = entry(b'S', b"sparse", b"", &[7; 1024]);
        sparse.patches = vec![
            (257, b"ustar  \0".to_vec()),
            (386, b"00000000000\x0000000001000\0".to_vec()),
            (483, b"00000010000\0".to_vec()),
        ];
        sparse.bytes()
    };
    let map = b"2\n0\n512\n4096\n512\n".to_vec();
    let in_data = [map, vec![0; 495], vec![1; 1024]].concat();
    vec![
        archive(&[
            pax(&[(b"mtime", b"1.5"), xattr]),
            file("dir/file", &[9; 600]),
            symlink("link", "dir"),
            file("link/below", b"x"),
            link("hard", "dir/file"),
        ]),
        archive(&[
            entry(b'L', b"././@LongLink", b"", b"a-long-name").bytes(),
            entry(b'K', b"././@LongLink", b"", b"a-long-target").bytes(),
            symlink("short", "x"),
            entry(b'3', b"null", b"", b"").bytes(),
            entry(b'g', b"global", b"", b"19 comment=a global\n").bytes(),
            dir("empty"),
        ]),
        archive(&[old_sparse]),
        archive(&[
            pax(&[
                (b"GNU.sparse.size", b"8192"),
                (b"GNU.sparse.map", b"0,512,4096,512"),
            ]),
            file("sparse", &[3; 1024]),
        ]),
        archive(&[
            pax(&[
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.realsize", b"8192"),
            ]),
            file("sparse", &in_data),
        ]),
    ]
}

pub(super) fn tar() -> Target {
    Target {
        corpus: archives(),
        fix: fix_tar,
        run: Box::new(|bytes| told(load(bytes))),
    }
}

pub(super) fn compressed_tar() -> Target {
    let mut corpus = Vec::new();
    for plain in archives() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        corpus.push(gzip.finish().unwrap());
        corpus.push(zstd::encode_all(plain.as_slice(), 3).unwrap());
    }
    Target {
        corpus,
        fix: |_| (),
        run: Box::new(|bytes| told(load(bytes))),
    }
}

/// The input is the data of an extended header.
pub(super) fn pax_records() -> Target {
    let records: [&[u8]; 4] = [
        b"11 path=ab\n17 linkpath=a/b/c\n",
        b"15 mtime=-1.25\n27 SCHILY.xattr.user.x=abc\n",
        b"38 LIBARCHIVE.xattr.user.%c3%a4x=AP8B\n20 size=99999999999\n",
        b"21 GNU.sparse.offset=0\n24 GNU.sparse.numbytes=3\n20 GNU.sparse.size=9\n",
    ];
    Target {
        corpus: records.map(<[u8]>::to_vec).into(),
        fix: fix_lengths,
        run: Box::new(|bytes| {
            let header = entry(b'x', b"pax", b"", bytes).bytes();
            told(load(&archive(&[header, file("file", b"abc")])))
        }),
    }
}

/// Gives every line the length that it has.
fn fix_lengths(bytes: &mut Vec<u8>) {
    let mut out = Vec::new();
    for line in bytes.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let body = line.splitn(2, |b| *b == b' ').nth(1).unwrap_or(line);
        let base = body.len() + 2;
        let len = (base..).find(|n| base + n.to_string().len() == *n).unwrap();
        out.extend_from_slice(format!("{len} ").as_bytes());
        out.extend_from_slice(body);
        out.push(b'\n');
    }
    *bytes = out;
}

pub(super) fn acl_text() -> Target {
    let texts: [&[u8]; 3] = [
        b"user::rw-,user:1000:r--,group::r--,mask::r--,other::r--",
        b"user::rwx\ngroup::r-x\ngroup:name:rwx:77\nmask::rwx\nother::---\n",
        b"default:user::rwx,default:user:5:r-x,default:group::r-x,default:mask:r-x,default:other:r-x",
    ];
    Target {
        corpus: texts.map(<[u8]>::to_vec).into(),
        fix: |_| (),
        run: Box::new(|bytes| {
            let text: Vec<u8> = bytes.iter().copied().filter(|b| *b != 0).collect();
            let header = pax(&[
                (b"SCHILY.acl.access", &text),
                (b"SCHILY.acl.default", &text),
            ]);
            told(load(&archive(&[header, dir("folder")])))
        }),
    }
}

fn sha256(bytes: &[u8]) -> String {
    let hex: Vec<String> = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    hex.concat()
}

/// Between the documents of an image in one input.
const CUT: &[u8] = b"\n%%%%\n";

fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.join(CUT)
}

fn split(input: &[u8], count: usize) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut rest = input;
    while let Some((first, tail)) = rest.split_first() {
        if rest.starts_with(CUT) && parts.len() < count {
            parts.push(Vec::new());
            rest = &rest[CUT.len()..];
        } else {
            parts.last_mut().unwrap().push(*first);
            rest = tail;
        }
    }
    parts.resize(count, Vec::new());
    parts
}

/// Puts digests and sizes of what was written before into a document.
fn filled(document: &[u8], known: &[(&str, &[u8])]) -> Vec<u8> {
    let mut text = String::from_utf8_lossy(document).into_owned();
    for (name, bytes) in known {
        text = text.replace(&format!("@{name}@"), &sha256(bytes));
        text = text.replace(&format!("\"#{name}#\""), &bytes.len().to_string());
    }
    text.into_bytes()
}

pub(super) fn oci_layout() -> Target {
    let index = br##"{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:@manifest@","size":"#manifest#","platform":{"os":"linux","architecture":"amd64"}}]}"##;
    let manifest = br##"{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:@config@","size":"#config#"},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:@layer@","size":"#layer#"}]}"##;
    let config = br#"{"architecture":"amd64","os":"linux","config":{"Env":["A=b"],"Cmd":["/bin/sh"]},"rootfs":{"type":"layers","diff_ids":["sha256:@layer@"]}}"#;
    let layers = archives().into_iter().chain([archive(&[
        dir("a"),
        file("a/.wh.gone", b""),
        file("a/.wh..wh..opq", b""),
    ])]);
    Target {
        corpus: layers
            .map(|layer| join(&[index, manifest, config, &layer]))
            .collect(),
        fix: |_| (),
        run: Box::new(|input| {
            let parts = split(input, 4);
            let dir = tempfile::tempdir().unwrap();
            let blobs = dir.path().join("blobs/sha256");
            fs::create_dir_all(&blobs).unwrap();
            let mut layer = parts[3].clone();
            fix_tar(&mut layer);
            let config = filled(&parts[2], &[("layer", &layer)]);
            let manifest = filled(&parts[1], &[("layer", &layer), ("config", &config)]);
            let index = filled(&parts[0], &[("manifest", &manifest)]);
            for blob in [&layer, &config, &manifest] {
                fs::write(blobs.join(sha256(blob)), blob).unwrap();
            }
            fs::write(dir.path().join("index.json"), index).unwrap();
            fs::write(
                dir.path().join("oci-layout"),
                r#"{"imageLayoutVersion":"1.0.0"}"#,
            )
            .unwrap();
            without_folder(
                dir.path(),
                source::load(&SourceSpec::Oci(dir.path().into(), None), &options()),
            )
        }),
    }
}

/// The result without the name of the folder, which is new each time.
fn without_folder(dir: &Path, loaded: Result<Loaded, SourceError>) -> String {
    told(loaded).replace(&dir.display().to_string(), "")
}

pub(super) fn docker_archive() -> Target {
    let manifest = br#"[{"Config":"@config@.json","RepoTags":["a:b"],"Layers":["layer.tar"]}]"#;
    let config = br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:@layer@"]}}"#;
    Target {
        corpus: archives()
            .iter()
            .map(|layer| join(&[manifest, config, layer]))
            .collect(),
        fix: |_| (),
        run: Box::new(|input| {
            let parts = split(input, 3);
            let mut layer = parts[2].clone();
            fix_tar(&mut layer);
            let config = filled(&parts[1], &[("layer", &layer)]);
            let manifest = filled(&parts[0], &[("config", &config)]);
            let whole = archive(&[
                file("manifest.json", &manifest),
                file(&format!("{}.json", sha256(&config)), &config),
                file("layer.tar", &layer),
            ]);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("image.tar");
            fs::write(&path, whole).unwrap();
            without_folder(
                dir.path(),
                source::load(&SourceSpec::DockerArchive(path), &options()),
            )
        }),
    }
}

/// Each three bytes of the input make a file, directory, device or attribute in an upper directory.
pub(super) fn upper_dir() -> Target {
    Target {
        corpus: vec![
            vec![0, 1, 0, 1, 2, 0, 2, 3, 0],
            vec![1, 1, 0, 3, 1, 0, 0, 17, 0, 3, 17, 4],
        ],
        fix: |_| (),
        run: Box::new(|input| {
            let dir = tempfile::tempdir().unwrap();
            for step in input.chunks_exact(3).take(24) {
                upper_step(dir.path(), step);
            }
            without_folder(
                dir.path(),
                source::load(&SourceSpec::Upper(dir.path().into()), &options()),
            )
        }),
    }
}

fn upper_step(root: &Path, step: &[u8]) {
    let name = OsString::from_vec(vec![b'a' + step[1] % 8]);
    let parent = if step[1] & 16 == 0 {
        root.to_owned()
    } else {
        root.join("a")
    };
    let path = parent.join(name);
    // What is in the way stays, and what cannot be made is left out.
    match step[0] % 5 {
        0 => write_new(&path, &vec![1; usize::from(step[2]) * 50]),
        1 => drop(fs::create_dir(&path)),
        2 => {
            let (mode, device) = (nix::sys::stat::SFlag::S_IFCHR, u64::from(step[2] % 2));
            let _made: Result<(), _> =
                nix::sys::stat::mknod(&path, mode, nix::sys::stat::Mode::empty(), device);
        }
        3 => {
            let names = [
                "trusted.overlay.opaque",
                "user.overlay.opaque",
                "trusted.overlay.whiteout",
                "user.overlay.whiteout",
                "trusted.overlay.overlay.opaque",
                "trusted.overlay.redirect",
                "trusted.overlay.origin",
                "user.other",
                "trusted.overlay.nonsense",
                "user.overlay.overlay.x",
            ];
            let values: [&[u8]; 4] = [b"y", b"x", b"", b"/../../etc"];
            let (name, value) = (
                names[usize::from(step[2]) % 10],
                values[usize::from(step[2] / 10) % 4],
            );
            let _set: Result<(), _> =
                rustix::fs::lsetxattr(&path, name, value, rustix::fs::XattrFlags::empty());
        }
        _ => drop(std::os::unix::fs::symlink(OUTSIDE, &path)),
    }
}

/// Where links of random trees lead: out of the tree, and to nothing that any machine has. These tests run as root, so a link to
/// a real file must not be made at all.
const OUTSIDE: &str = "../../no-such-folder-of-dsec/file";

/// Makes a file that was not there. A link of that name is in the way and is not followed: `fs::write` would write where it leads.
fn write_new(path: &Path, bytes: &[u8]) {
    let made = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path);
    if let Ok(mut file) = made {
        std::io::Write::write_all(&mut file, bytes).unwrap();
    }
}

/// Turned red by: `fs::write` in `upper_step`.
#[test]
fn random_trees_are_not_written_through_their_links() {
    let dir = tempfile::tempdir().unwrap();
    let (root, canary) = (dir.path().join("root"), dir.path().join("canary"));
    fs::create_dir(&root).unwrap();
    fs::write(&canary, b"untouched").unwrap();
    std::os::unix::fs::symlink(&canary, root.join("a")).unwrap();
    for kind in 0..5 {
        upper_step(&root, &[kind, 0, 100]);
        upper_step(&root, &[kind, 16, 100]);
    }
    assert!(
        fs::read(&canary).unwrap() == b"untouched",
        "written through a link"
    );
}
