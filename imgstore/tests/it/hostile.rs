//! Input made to do harm: out of the tree, out of memory, out of disk. Each gets a typed error with bounded memory.

use std::collections::BTreeMap;
use std::fs;

use imgstore::format::manifest::{Blob, Manifest, Totals};
use imgstore::format::{chunk_table, frame, names};
use imgstore::ids::Digest;
use imgstore::origin::mem::MemOrigin;
use imgstore::source::{
    self, EntryFault, Loaded, SourceError, SourceOptions, SourceSpec, TarFault,
};
use imgstore::store::layer;
use imgstore::tree::{Kind, ROOT};

use crate::fuzz::sys::peak_of;
use crate::tar_bytes::{dir, entry, file, link, pax, symlink, tar};

/// What any of these may need.
const MEMORY_MAX: usize = 64 << 20;

fn load(bytes: &[u8]) -> Result<Loaded, SourceError> {
    let options = SourceOptions::new(std::env::temp_dir());
    source::load_tar_stream(bytes, "input", &options)
}

/// The error of an input, which must not have cost much more memory than the input has bytes.
fn refused(bytes: &[u8]) -> SourceError {
    let (loaded, peak) = peak_of(|| load(bytes));
    assert!(
        peak < MEMORY_MAX + 4 * bytes.len(),
        "{peak} bytes of memory"
    );
    loaded.unwrap_err()
}

fn entry_fault(entries: &[Vec<u8>]) -> EntryFault {
    match refused(&tar(entries)) {
        SourceError::Entry { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

fn tar_fault(bytes: &[u8]) -> TarFault {
    match refused(bytes) {
        SourceError::Archive { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

/// Names in the root, with what they are.
fn root_of(entries: &[Vec<u8>]) -> BTreeMap<String, &'static str> {
    let loaded = load(&tar(entries)).unwrap();
    let names = loaded.tree.entries(ROOT).map(|(name, id)| {
        let kind = match loaded.tree.inode(id).kind {
            Kind::Dir(_) => "dir",
            Kind::File(_) => "file",
            Kind::Symlink(_) => "symlink",
            _ => "other",
        };
        (String::from_utf8(name.to_vec()).unwrap(), kind)
    });
    names.collect()
}

/// Red when `tree_path::parts` lets `..` pass.
#[test]
fn paths_that_lead_out_are_refused() {
    for path in ["../x", "a/../../x", "a/..", "..", "./../x"] {
        let unsafe_path = |fault| matches!(fault, EntryFault::UnsafePath(_));
        assert!(unsafe_path(entry_fault(&[file(path, b"x")])), "{path}");
        assert!(
            unsafe_path(entry_fault(&[link("hard", path)])),
            "link to {path}"
        );
        let long = pax(&[(b"path", path.as_bytes())]);
        assert!(
            unsafe_path(entry_fault(&[long, file("short", b"x")])),
            "PAX {path}"
        );
    }
    // A slash in front means the root of the layer, as everywhere; the host's files are not there.
    assert_eq!(
        root_of(&[file("/etc-passwd", b"x")]),
        [("etc-passwd".into(), "file")].into()
    );
    let missing = entry_fault(&[link("hard", "/etc/shadow")]);
    assert_eq!(missing, EntryFault::MissingLinkTarget("/etc/shadow".into()));
}

/// A link to a place outside, then a file below the link: it lands inside, wherever the link points.
#[test]
fn writes_through_links_stay_inside() {
    for target in ["/", "..", "../../..", "/..", "a/../../.."] {
        let entries = [dir("a"), symlink("out", target), file("out/file", b"x")];
        assert_eq!(root_of(&entries).get("file"), Some(&"file"), "{target}");
    }
    // A place that is not there is made inside, never looked for on the host.
    let root = root_of(&[symlink("out", "/tmp/somewhere"), file("out/file", b"x")]);
    assert_eq!(root.get("tmp"), Some(&"dir"));
    // Link over link.
    assert_eq!(
        entry_fault(&[symlink("a", "b"), symlink("b", "a"), file("a/x", b"")]),
        EntryFault::SymlinkLoop
    );
    // The hard link is to the link itself, and what is written to it replaces it.
    let root = root_of(&[symlink("s", "/etc/passwd"), link("h", "s"), file("h", b"x")]);
    assert_eq!((root["s"], root["h"]), ("symlink", "file"));
}

/// Documents of an image that name files outside of it.
#[test]
fn images_cannot_name_files_of_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let options = SourceOptions::new(dir.path());
    let layout = dir.path().join("layout");
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    fs::write(
        layout.join("oci-layout"),
        r#"{"imageLayoutVersion":"1.0.0"}"#,
    )
    .unwrap();
    for digest in [
        "sha256:../../../../../../etc/passwd",
        "../../etc:passwd",
        "sha256:",
        "sha256:/etc/passwd",
        "x",
    ] {
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{digest}","size":1}}]}}"#
        );
        fs::write(layout.join("index.json"), index).unwrap();
        let error = source::load(&SourceSpec::Oci(layout.clone(), None), &options).unwrap_err();
        assert!(
            matches!(error, SourceError::Image { .. }),
            "{digest}: {error}"
        );
        assert!(!error.to_string().contains("root:"), "{error}");
    }
    let docker = dir.path().join("image.tar");
    for layer in ["../../../etc/passwd", "/etc/passwd", "link"] {
        let manifest = format!(r#"[{{"Config":"c.json","Layers":["{layer}"]}}]"#);
        let archive = tar(&[
            file("manifest.json", manifest.as_bytes()),
            file("c.json", br#"{"rootfs":{"diff_ids":["sha256:0"]}}"#),
            symlink("link", "/etc/passwd"),
        ]);
        fs::write(&docker, archive).unwrap();
        let error = source::load(&SourceSpec::DockerArchive(docker.clone()), &options).unwrap_err();
        let typed = matches!(error, SourceError::Image { .. } | SourceError::Entry { .. });
        assert!(
            typed && !error.to_string().contains("root:"),
            "{layer}: {error}"
        );
    }
}

/// 1.5 GiB of zeros in a few KB. Red without the check in `decompress::Plain`: the archive loads.
#[test]
fn a_small_archive_cannot_fill_the_disk() {
    let mut header = entry(b'V', b"zeros", b"", b"");
    header.size = 3 << 29;
    let mut plain = header.bytes();
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    std::io::copy(&mut plain.as_slice(), &mut encoder).unwrap();
    plain.resize(1 << 20, 0);
    plain.fill(0);
    for _ in 0..1536 {
        std::io::copy(&mut plain.as_slice(), &mut encoder).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 1 << 20, "{} bytes", bomb.len());
    match refused(&bomb) {
        SourceError::Expansion {
            plain, compressed, ..
        } => {
            assert!(plain > 1 << 30 && plain < (1 << 30) + (1 << 20) && compressed < 1 << 20);
        }
        other => panic!("{other}"),
    }
}

/// Headers that are small each and large together. Red when either sum is not kept.
#[test]
fn extended_headers_are_bounded_in_sum() {
    let value = vec![b'v'; 6 << 20];
    let header = |n: u8| {
        let key = [b"SCHILY.xattr.user.".as_slice(), &[b'a' + n]].concat();
        pax(&[(&key, &value)])
    };
    let archive = tar(&[header(0), header(1), header(2), file("x", b"")]);
    assert!(matches!(
        tar_fault(&archive),
        TarFault::ExtendedHeader { .. }
    ));
    // What holds for every entry is carried by every entry.
    let record = [b"6005 comment=".as_slice(), &vec![b'c'; 5991], b"\n"].concat();
    let global = entry(b'g', b"global", b"", &record).bytes();
    assert!(matches!(
        tar_fault(&tar(&[global, file("x", b"")])),
        TarFault::ExtendedHeader { max: 4096, .. }
    ));
    let half = [b"2505 comment=".as_slice(), &vec![b'c'; 2491], b"\n"].concat();
    let half = entry(b'g', b"global", b"", &half).bytes();
    load(&tar(&[half.clone(), file("x", b"")])).unwrap();
    assert!(matches!(
        tar_fault(&tar(&[half.clone(), half, file("x", b"")])),
        TarFault::ExtendedHeader { max: 1591, .. }
    ));
}

/// A map without line ends was searched from its start for every block: hours for a gigabyte. Red without the bound on a
/// line (another error, after minutes).
#[test]
fn a_sparse_map_without_lines_is_refused_at_once() {
    let records: [(&[u8], &[u8]); 3] = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.realsize", b"8192"),
    ];
    let archive = tar(&[pax(&records), file("sparse", &vec![b'1'; 4 << 20])]);
    assert_eq!(
        tar_fault(&archive),
        TarFault::Sparse("expected a number on every line")
    );
    let counts = tar(&[
        pax(&records),
        file("sparse", b"18446744073709551615\n0\n1\n"),
    ]);
    assert!(matches!(
        tar_fault(&counts),
        TarFault::Sparse(_) | TarFault::Pax { .. }
    ));
}

/// Long paths, and paths made long through links: the tree's walk would be quadratic in them. Red without any of the three
/// bounds: a path's, a link target's, and the whole path's in `finish`.
#[test]
fn endless_paths_are_refused() {
    let long = "d/".repeat(8193);
    let header = pax(&[(b"path", long.as_bytes())]);
    assert!(matches!(
        entry_fault(&[header, dir("x")]),
        EntryFault::UnsafePath(_)
    ));

    let far = format!("/{}", "d".repeat(5000));
    let header = pax(&[(b"linkpath", far.as_bytes())]);
    let entries = [header, symlink("far", "x"), file("far/x", b"")];
    assert!(matches!(entry_fault(&entries), EntryFault::UnsafePath(_)));

    let mut entries = Vec::new();
    for n in 0..18 {
        let below = if n == 0 {
            String::new()
        } else {
            format!("l{}/", n - 1)
        };
        let target = format!("{below}{}", "d/".repeat(2040));
        entries.push(pax(&[(b"linkpath", target.as_bytes())]));
        entries.push(symlink(&format!("l{n}"), "x"));
        entries.push(file(&format!("l{n}/x"), b""));
    }
    let error = refused(&tar(&entries)).to_string();
    assert!(
        error.contains("path from the root") && error.contains("65536"),
        "{error}"
    );
}

/// A manifest that says 1 GiB of metadata, and an object of a few bytes. Red without `check_claim`: 1 GiB is taken.
#[test]
fn absurd_sizes_take_no_memory() {
    let origin = MemOrigin::default();
    let blob = Blob {
        digest: Digest::of(b""),
        size: 1 << 30,
    };
    let manifest = Manifest {
        chunks: blob,
        features_compat: Vec::new(),
        features_incompat: Vec::new(),
        format: 1,
        meta: blob,
        segments: Vec::new(),
        totals: Totals::default(),
    };
    let stored = frame::encode(&[0; 4096], 1);
    origin.tamper(|objects| drop(objects.insert(names::meta(&blob.digest), stored)));
    let (read, peak) = peak_of(|| layer::read_meta(&origin, &manifest));
    let error = read.unwrap_err().to_string();
    assert!(
        error.contains("expected at most") && error.contains("1073741824"),
        "{error}"
    );
    assert!(peak < 1 << 20, "{peak} bytes of memory");
    frame::check_claim(1 << 20, 256 << 20).unwrap();
    frame::check_claim(1 << 20, (256 << 20) + 1).unwrap_err();
    frame::check_claim(1, 64 << 20).unwrap();

    let mut table = chunk_table::encode(Vec::new());
    table[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let (parsed, peak) = peak_of(|| chunk_table::parse(&table));
    assert!(
        parsed
            .unwrap_err()
            .to_string()
            .contains("4294967295 records")
            && peak < 1 << 20
    );
}

/// Brackets in brackets: an error and no stack overflow.
#[test]
fn deep_json_is_refused() {
    for open in ["[", "{\"a\":"] {
        let text = open.repeat(1 << 20);
        let (parsed, peak) =
            peak_of(|| Manifest::parse(text.as_bytes(), &Digest::of(text.as_bytes())));
        assert!(parsed.is_err() && peak < MEMORY_MAX, "{peak}");
    }
}
