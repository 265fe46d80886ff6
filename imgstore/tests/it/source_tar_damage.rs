//! Tars that are cut, padded, or damaged.

use imgstore::source::{Loaded, SourceError, TarFault, load_tar_stream};

use crate::model::{bytes, load_text, options, paths, sh};
use crate::tar_bytes::{entry, file, pax, tar};

fn load(bytes: &[u8]) -> Result<Loaded, SourceError> {
    load_tar_stream(bytes, "damaged.tar", &options())
}

fn fault(bytes: &[u8]) -> TarFault {
    match load(bytes) {
        Err(SourceError::Archive { fault, .. }) => fault,
        other => panic!("expected a fault of the archive, found {other:?}"),
    }
}

#[test]
fn an_archive_may_end_between_entries_and_nowhere_else() {
    let whole = tar(&[file("a", &[1; 700]), file("b", b"")]);
    for cut in 0..=whole.len() {
        let loaded = load(&whole[..cut]);
        let names = loaded.as_ref().map(|loaded| paths(&loaded.tree));
        match cut {
            0 => assert_eq!(fault(&whole[..0]), TarFault::Empty),
            1536 => assert_eq!(names.unwrap(), ["a"]),
            2048 | 2560 | 3072 => assert_eq!(names.unwrap(), ["a", "b"]),
            _ => assert!(
                matches!(fault(&whole[..cut]), TarFault::Truncated { .. }),
                "cut at {cut}"
            ),
        }
    }
}

#[test]
fn a_seekable_archive_is_cut_with_the_same_results() {
    let dir = tempfile::tempdir().unwrap();
    let whole = tar(&[file("a", &[1; 700])]);
    for (cut, good) in [
        (512, false),
        (1000, false),
        (1300, false),
        (1536, true),
        (2560, true),
    ] {
        let path = dir.path().join("a.tar");
        std::fs::write(&path, &whole[..cut]).unwrap();
        let loaded = load_text(path.to_str().unwrap());
        assert_eq!(loaded.is_ok(), good, "{cut}: {loaded:?}");
    }
}

#[test]
fn zero_filled_files_are_not_the_end_and_garbage_behind_the_end_is_ignored() {
    let mut archive = tar(&[file("zeros", &[0; 4096]), file("last", b"x")]);
    archive.extend_from_slice(&[0x55; 999]);
    let loaded = load(&archive).unwrap();
    assert_eq!(paths(&loaded.tree), ["last", "zeros"]);
    assert_eq!(bytes(&loaded.tree, "zeros"), [0; 4096]);
    assert_eq!(loaded.bytes_in, 4097);
}

#[test]
fn damage_is_told_by_place_and_kind() {
    let mut flipped = tar(&[file("a", b""), file("b", b"")]);
    flipped[513] ^= 1;
    assert!(matches!(fault(&flipped), TarFault::Checksum { .. }));
    let error = load(&flipped).unwrap_err().to_string();
    assert!(
        error.contains("`damaged.tar`, entry at byte 512"),
        "{error}"
    );

    let mut lone = file("a", b"");
    lone.extend_from_slice(&[0; 512]);
    lone.extend_from_slice(&tar(&[file("b", b"")]));
    assert_eq!(fault(&lone), TarFault::LoneZeroBlock);

    let odd = tar(&[entry(b'Z', b"a", b"", b"").bytes()]);
    assert_eq!(fault(&odd), TarFault::Type("Z".to_owned()));
    assert_eq!(fault(&tar(&[pax(&[(b"path", b"x")])])), TarFault::Dangling);

    let mut text = entry(b'0', b"a", b"", b"");
    text.patches.push((108, b"12x4567\0".to_vec()));
    assert!(matches!(
        fault(&tar(&[text.bytes()])),
        TarFault::Number { field: "uid", .. }
    ));

    let mut huge = entry(b'x', b"a", b"", b"");
    huge.size = 0o77_777_777_777;
    assert!(matches!(
        fault(&tar(&[huge.bytes()])),
        TarFault::ExtendedHeader { .. }
    ));
}

#[test]
fn a_size_that_is_not_there_takes_no_memory() {
    let mut huge = entry(b'0', b"a", b"", b"");
    huge.size = 0o77_777_777_777;
    assert!(matches!(
        fault(&tar(&[huge.bytes()])),
        TarFault::Truncated { .. }
    ));
    let huge = tar(&[pax(&[(b"size", b"18446744073709551615")]), file("a", b"")]);
    assert!(matches!(fault(&huge), TarFault::Truncated { .. }));
}

#[test]
fn damaged_sparse_maps_are_refused() {
    let sparse = |records: &[(&[u8], &[u8])], data: &[u8]| {
        let archive = tar(&[pax(records), file("s", data)]);
        fault(&archive)
    };
    let size: (&[u8], &[u8]) = (b"GNU.sparse.size", b"100");
    for map in [
        "0,5,3,1",
        "0,200",
        "0,3",
        "5",
        "0,5,99,2",
        "0,18446744073709551615",
    ] {
        let found = sparse(&[size, (b"GNU.sparse.map", map.as_bytes())], b"12345");
        assert!(matches!(found, TarFault::Sparse(_)), "{map}: {found:?}");
    }
    let v1: [(&[u8], &[u8]); 3] = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.realsize", b"100"),
    ];
    for data in ["9999999999\n0\n1\n", "1\n0\n", "", "-1\n"] {
        let mut block = data.as_bytes().to_vec();
        block.resize(if data.is_empty() { 0 } else { 512 }, b'\n');
        let found = sparse(&v1, &block);
        assert!(
            matches!(found, TarFault::Sparse(_) | TarFault::Pax { .. }),
            "{data}: {found:?}"
        );
    }
}

/// A file of holes claims any size for nothing; alone or together with others it is refused before it is scanned.
#[test]
fn more_than_64_tib_of_files_are_refused() {
    let sparse = |name: &str, size: u64| {
        let size = size.to_string();
        let records: [(&[u8], &[u8]); 2] = [
            (b"GNU.sparse.size", size.as_bytes()),
            (b"GNU.sparse.map", b"0,1"),
        ];
        [pax(&records), file(name, b"x")].concat()
    };
    let refused = |entries: &[Vec<u8>]| match load(&tar(entries)) {
        Err(SourceError::Unsupported { path, what, .. }) => (path, what),
        other => panic!("expected a refusal, found {other:?}"),
    };
    let max = 1 << 46;
    let loaded = load(&tar(&[sparse("a", max)])).unwrap();
    assert_eq!(paths(&loaded.tree), ["a"]);
    let alone = refused(&[sparse("a", max + 1)]);
    assert_eq!(alone, ("a".to_owned(), "file size"));
    let together = refused(&[sparse("a", max / 2), sparse("b", max / 2), sparse("c", 1)]);
    assert_eq!(
        together,
        ("c".to_owned(), "size of all files up to this one")
    );
}

#[test]
fn damaged_and_unknown_compressions_are_told() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "seq 100000 > f; tar -cf a f; gzip -k a; zstd -q a; xz -k a; head -c 2000 a.gz > cut.gz; head -c 2000 a.zst > cut.zst; \
         cp a.gz sum.gz; printf XXXX | dd of=sum.gz bs=1 seek=$(($(stat -c %s sum.gz) - 8)) conv=notrunc status=none",
    );
    for name in ["cut.gz", "cut.zst", "sum.gz"] {
        let found = load_text(dir.path().join(name).to_str().unwrap());
        assert!(
            matches!(found, Err(SourceError::ArchiveRead { .. })),
            "{name}: {found:?}"
        );
    }
    let error = load_text(dir.path().join("a.xz").to_str().unwrap()).unwrap_err();
    assert!(error.to_string().contains("compressed with xz"), "{error}");
    let error = load_text("/etc/passwd").unwrap_err().to_string();
    assert!(
        error.contains("/etc/passwd") && error.contains("not a tar header"),
        "{error}"
    );
}

/// Makes every block that looks like a header valid again, so that damage gets behind the checksum.
pub(crate) fn fix_checksums(archive: &mut [u8]) {
    for block in archive.chunks_exact_mut(512) {
        if block[257..262] == *b"ustar" {
            block[148..156].copy_from_slice(b"        ");
            let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
}
