//! Work on files: contents, trees, and paths that try to lead out.

use std::path::Path;

use sandboxd::backend::Place;
use sandboxd::container::files::{EntryKind, FileEntry, FileReply, FileRequest};
use sandboxd::container::link::{Event, Link, LinkError};
use sandboxd::container::protocol::{Answer, Failure, Request, kind};

use crate::host::Host;

fn ask(host: &Host, place: &Place, request: FileRequest) -> Result<FileReply, LinkError> {
    match host.ask(place, &Request::files(request))? {
        Answer::Files { reply } => Ok(reply),
        other => panic!("{other:?}"),
    }
}

/// Sends `bytes` to a request that takes some.
fn put(
    host: &Host,
    place: &Place,
    request: FileRequest,
    bytes: &[u8],
) -> Result<FileReply, LinkError> {
    let socket = host.door(place);
    host.runtime.block_on(async {
        let mut link = Link::connect(&socket).await?;
        let request = serde_json::to_vec(&Request::files(request)).unwrap();
        link.send(kind::REQUEST, &request).await?;
        for piece in bytes.chunks(100_000) {
            link.send(kind::DATA, piece).await?;
        }
        link.send(kind::END, &[]).await?;
        match link.answer().await? {
            Answer::Files { reply } => Ok(reply),
            other => panic!("{other:?}"),
        }
    })
}

fn get(host: &Host, place: &Place, request: FileRequest) -> Result<Vec<u8>, LinkError> {
    let socket = host.door(place);
    host.runtime.block_on(async {
        let mut link = Link::connect(&socket).await?;
        link.request(&Request::files(request)).await?;
        let mut bytes = Vec::new();
        loop {
            match link.next().await? {
                Event::Data(piece) => bytes.extend(piece),
                Event::End => return Ok(bytes),
                other => panic!("{other:?}"),
            }
        }
    })
}

fn read(path: &str) -> FileRequest {
    FileRequest::Read {
        path: path.to_owned(),
        offset: 0,
        len: None,
    }
}

fn write(path: &str) -> FileRequest {
    FileRequest::Write {
        path: path.to_owned(),
        mode: None,
    }
}

fn noise(len: usize) -> Vec<u8> {
    (0..len)
        .map(|n| u8::try_from((n * n % 251) ^ ((n >> 8) & 0xff)).unwrap())
        .collect()
}

#[test]
fn files_of_any_size_and_content_go_up_and_down() {
    let host = Host::new();
    let place = host.sandbox("files");
    for len in [0, 1, 18 * 1024 + 1, 1 << 20, 9_000_001] {
        let bytes = noise(len);
        let reply = put(&host, &place, write("/w/deep/file"), &bytes).unwrap();
        assert_eq!(reply, FileReply::Done(len as u64));
        assert!(
            get(&host, &place, read("/w/deep/file")).unwrap() == bytes,
            "{len}"
        );
    }
    host.ok(&place, "chmod 751 /w/deep/file; chown 3:4 /w/deep/file");
    put(&host, &place, write("/w/deep/file"), b"new").unwrap();
    assert_eq!(
        host.ok(&place, "stat -c '%a %u %g %s' /w/deep/file; ls -A /w/deep"),
        "751 3 4 3\nfile\n"
    );
    let part = FileRequest::Read {
        path: "/w/deep/file".to_owned(),
        offset: 1,
        len: Some(1),
    };
    assert_eq!(get(&host, &place, part).unwrap(), b"e");
}

#[test]
fn entries_are_listed_made_renamed_and_removed() {
    let host = Host::new();
    let place = host.sandbox("entries");
    ask(
        &host,
        &place,
        FileRequest::MakeDir {
            path: "/w/a/b".to_owned(),
            mode: Some(0o700),
        },
    )
    .unwrap();
    put(&host, &place, write("/w/a/f"), b"12345").unwrap();
    host.ok(&place, "ln -s /etc/passwd /w/a/link; mkfifo /w/a/pipe");
    let list = |depth| {
        let request = FileRequest::List {
            path: "/w".to_owned(),
            depth,
        };
        let FileReply::Entries(entries) = ask(&host, &place, request).unwrap() else {
            panic!()
        };
        let short = |e: FileEntry| (e.path, e.kind, e.size);
        entries
            .into_iter()
            .map(short)
            .filter(|(_, kind, _)| *kind != EntryKind::Directory)
            .collect::<Vec<_>>()
    };
    assert_eq!(list(1), []);
    let expected = [
        ("/w/a/f", EntryKind::File, 5),
        ("/w/a/link", EntryKind::Symlink, 11),
        ("/w/a/pipe", EntryKind::Other, 0),
    ];
    assert_eq!(
        list(3),
        expected.map(|(path, kind, size)| (path.to_owned(), kind, size))
    );
    let stat = FileRequest::Stat {
        path: "/w/a/link".to_owned(),
    };
    let FileReply::Entries(found) = ask(&host, &place, stat).unwrap() else {
        panic!()
    };
    assert_eq!(found[0].symlink_target.as_deref(), Some("/etc/passwd"));
    let rename = FileRequest::Rename {
        from: "/w/a/f".to_owned(),
        to: "/w/g".to_owned(),
    };
    ask(&host, &place, rename).unwrap();
    ask(
        &host,
        &place,
        FileRequest::Remove {
            path: "/w/a".to_owned(),
        },
    )
    .unwrap();
    assert_eq!(host.ok(&place, "ls -A /w; test -e /etc/passwd"), "g\n");
    let kinds = |path: &str| match ask(
        &host,
        &place,
        FileRequest::Stat {
            path: path.to_owned(),
        },
    ) {
        Err(LinkError::Refused { failure, .. }) => failure,
        other => panic!("{other:?}"),
    };
    assert_eq!(kinds("/nothing"), Failure::NotFound);
    // A pipe is not read for ever.
    host.ok(&place, "mkfifo /w/pipe");
    assert!(get(&host, &place, read("/w/pipe")).is_err());
    assert!(get(&host, &place, read("/w")).is_err());
}

#[test]
fn links_lead_nowhere_but_inside() {
    let host = Host::new();
    let place = host.sandbox("links");
    let victim = host.dir.path().join("victim");
    std::fs::write(&victim, b"precious").unwrap();
    let outside = host.dir.path().to_str().unwrap();
    host.ok(
        &place,
        &format!(
            "mkdir /w; ln -s {outside} /w/out; ln -s ../../../../../../../..{outside}/victim /w/up"
        ),
    );
    assert!(get(&host, &place, read("/w/out/victim")).is_err());
    assert!(get(&host, &place, read("/w/up")).is_err());
    assert!(
        get(
            &host,
            &place,
            read(&format!("/proc/1/root{outside}/victim"))
        )
        .is_err()
    );
    put(&host, &place, write("/w/out/victim"), b"evil").unwrap_err();
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.as_gnu_mut().unwrap().name[..12].copy_from_slice(b"../../escape");
    header.set_cksum();
    tar.append(&header, &b"evil"[..]).unwrap();
    let bytes = tar.into_inner().unwrap();
    put(
        &host,
        &place,
        FileRequest::Unpack {
            path: "/w/x".to_owned(),
        },
        &bytes,
    )
    .ok();
    assert!(!Path::new("/escape").exists());
    assert_eq!(host.sh(&place, "ls /escape").exit.exit_code, 2);
}

#[test]
fn trees_go_up_and_down_as_one_stream() {
    let host = Host::new();
    let place = host.sandbox("trees");
    let mut tar = tar::Builder::new(Vec::new());
    for n in 0..580 {
        let mut header = tar::Header::new_gnu();
        header.set_size(5);
        header.set_mode(0o640);
        header.set_uid(7);
        header.set_gid(8);
        tar.append_data(&mut header, format!("d{}/f{n}", n % 9), &b"hello"[..])
            .unwrap();
    }
    let bytes = tar.into_inner().unwrap();
    put(
        &host,
        &place,
        FileRequest::Unpack {
            path: "/w/t".to_owned(),
        },
        &bytes,
    )
    .unwrap();
    assert_eq!(
        host.ok(
            &place,
            "find /w/t -type f | wc -l; stat -c '%a %u %g' /w/t/d1/f1; ln -s f1 /w/t/d1/s"
        ),
        "580\n640 7 8\n"
    );
    let packed = get(
        &host,
        &place,
        FileRequest::Pack {
            path: "/w/t".to_owned(),
        },
    )
    .unwrap();
    let mut archive = tar::Archive::new(&*packed);
    let names: Vec<String> = archive
        .entries()
        .unwrap()
        .map(|e| e.unwrap().path().unwrap().display().to_string())
        .collect();
    assert_eq!(names.iter().filter(|n| n.contains("/f")).count(), 580);
    assert!(names.iter().any(|n| n.ends_with("d1/s")));
}
