//! Origins with a protocol of their own: S3, a registry, and both ways to 3FS. The servers are in this process, so that each lies
//! by itself about one object.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use imgstore::origin::Origin;
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::s3::S3Origin;
use imgstore::origin::three_fs::origin::{ThreeFsOptions, ThreeFsOrigin};
use three_fs_stand_in::control::Control;
use three_fs_stand_in::mount::StandIn;

use super::fill;
use super::kinds::{Lie, Lying, Site};
use super::layers::World;
use crate::bad_web::{PAGE, gzip};
use crate::oci::mock::Mock;
use crate::oci::sha256;
use crate::s3::server::{Canned, Server, Twist};

/// The answer about `bytes` that a server gives which lies so.
fn lying(bytes: &[u8], range: Option<&str>, lie: Lie) -> Canned {
    let asked = range.and_then(|text| text.strip_prefix("bytes=")?.split_once('-'));
    let asked = asked.map(|(from, to)| {
        let number = |text: &str| text.parse::<usize>().unwrap();
        (number(from), number(to).min(bytes.len().saturating_sub(1)))
    });
    let (from, to) = asked.unwrap_or((0, bytes.len().saturating_sub(1)));
    let right = bytes.get(from..=to).unwrap_or_default().to_vec();
    let mut answer = Canned {
        status: if asked.is_some() { 206 } else { 200 },
        headers: vec![("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT".to_owned())],
        ..Canned::default()
    };
    let mut told = Some((from, to));
    answer.body = match lie {
        Lie::WrongLength(n) => {
            let by = usize::try_from(n >> 8 & 0x3FF).unwrap() + 1;
            let earlier = from.saturating_sub(by);
            let moved = bytes.get(earlier..earlier + right.len()).unwrap_or(&right);
            match n % 5 {
                0 => right[..right.len().saturating_sub(by)].to_vec(),
                1 => [&right[..], &vec![0; by]].concat(),
                // Said, and not said.
                2 => {
                    told = Some((earlier, earlier + to - from));
                    moved.to_vec()
                }
                3 => moved.to_vec(),
                _ => {
                    told = None;
                    right
                }
            }
        }
        Lie::Whole => {
            (answer.status, told) = (200, None);
            bytes.to_vec()
        }
        Lie::Gzip(said) => {
            if said {
                answer.headers.push(("content-encoding", "gzip".to_owned()));
            }
            gzip(&right)
        }
        Lie::Html(true) => PAGE.iter().copied().cycle().take(right.len()).collect(),
        Lie::Html(false) => {
            (answer.status, told) = (200, None);
            answer
                .headers
                .push(("content-type", "text/html".to_owned()));
            PAGE.to_vec()
        }
    };
    if let (Some((from, to)), Some(_)) = (told, asked) {
        let text = format!("bytes {from}-{to}/{}", bytes.len());
        answer.headers.push(("content-range", text));
    }
    answer
}

/// `s3s-fs` on a folder.
struct S3 {
    server: Server,
    origin: Arc<S3Origin>,
}

pub(super) fn s3(world: &World) -> Box<dyn Site> {
    let server = Server::start();
    let origin = Arc::new(server.origin());
    let site = S3 { server, origin };
    fill(world, &site);
    Box::new(site)
}

impl S3 {
    fn path(&self, object: &str) -> PathBuf {
        self.server
            .dir
            .path()
            .join("layers/some/prefix")
            .join(object)
    }
}

fn write(path: &PathBuf, bytes: Option<&[u8]>) {
    match bytes {
        Some(bytes) => {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        None => fs::remove_file(path).unwrap(),
    }
}

impl Site for S3 {
    fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.origin) as Arc<dyn Origin>
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        write(&self.path(object), bytes);
    }

    fn lie(&self, origin: Arc<dyn Origin>, object: &str, lie: &Lie) -> Arc<dyn Origin> {
        let (bytes, lie) = (fs::read(self.path(object)).unwrap(), *lie);
        let place = format!("/layers/some/prefix/{object}");
        self.server.twist(Twist::new(move |path, range| {
            (path == place).then(|| lying(&bytes, range, lie))
        }));
        origin
    }

    fn honest(&self) {
        self.server.twist(Twist::default());
        self.server.seen();
    }
}

/// The registry of `oci::mock`. What lies there is damaged in two ways: the blob rots under its name, or the object's manifest
/// names another blob, as after a wrong repair.
struct Oci {
    mock: Mock,
    objects: std::sync::Mutex<std::collections::BTreeMap<String, Vec<u8>>>,
    turns: AtomicUsize,
}

pub(super) fn oci(world: &World) -> Box<dyn Site> {
    let site = Oci {
        mock: Mock::start(),
        objects: std::sync::Mutex::new(world.objects.clone()),
        turns: AtomicUsize::new(0),
    };
    for (object, bytes) in &world.objects {
        site.publish(object, bytes);
    }
    Box::new(site)
}

fn oci_tag(object: &str) -> String {
    let tag = object.replace('_', "__").replace('/', "_.");
    assert!(tag.len() <= 128 && !tag.contains('+'), "{tag}");
    tag
}

impl Oci {
    fn publish(&self, object: &str, bytes: &[u8]) {
        let digest = sha256(bytes);
        self.mock.put(&format!("blobs/{digest}"), "", bytes);
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let empty = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
        let record = format!(
            r#"{{"schemaVersion":2,"mediaType":"{kind}","config":{{"mediaType":"a/b","digest":"{empty}","size":2}},
               "layers":[{{"mediaType":"a/b","digest":"{digest}","size":{}}}],
               "annotations":{{"dev.dsec.object":"{object}","org.opencontainers.image.created":"2025-11-24T16:00:00.123Z"}}}}"#,
            bytes.len()
        );
        let place = format!("manifests/{}", oci_tag(object));
        self.mock.put(&place, kind, record.as_bytes());
    }

    fn turn(&self) -> usize {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }
}

impl Site for Oci {
    /// A client that remembers nothing.
    fn origin(&self) -> Arc<dyn Origin> {
        Arc::new(self.mock.origin([]))
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        let right = self.objects.lock().unwrap()[object].clone();
        match bytes {
            Some(bytes) if bytes == right => self.publish(object, bytes),
            Some(bytes) if self.turn().is_multiple_of(2) => self.publish(object, bytes),
            Some(bytes) => {
                let blob = format!("blobs/{}", sha256(&right));
                self.mock.put(&blob, "", bytes);
            }
            None if self.turn().is_multiple_of(2) => {
                self.mock.take(&format!("manifests/{}", oci_tag(object)));
            }
            None => self.mock.take(&format!("blobs/{}", sha256(&right))),
        }
    }

    fn lie(&self, origin: Arc<dyn Origin>, object: &str, lie: &Lie) -> Arc<dyn Origin> {
        let (bytes, lie) = (self.objects.lock().unwrap()[object].clone(), *lie);
        let place = match self.turn() % 3 {
            0 => format!("/v2/a/b/manifests/{}", oci_tag(object)),
            _ => format!("/v2/a/b/blobs/{}", sha256(&bytes)),
        };
        self.mock.state().twist =
            Twist::new(move |path, range| (path == place).then(|| lying(&bytes, range, lie)));
        origin
    }

    fn honest(&self) {
        self.mock.state().twist = Twist::default();
        self.mock.seen();
    }
}

/// The stand-in's mount: a lie about a length is a chunk of 3FS that is lost but for its beginning.
struct Mounted {
    mount: StandIn,
    origin: Arc<DirOrigin>,
    _dir: tempfile::TempDir,
}

/// A folder with what the library wants, and the mount over it.
fn three_fs() -> (tempfile::TempDir, StandIn) {
    let dir = tempfile::tempdir().unwrap();
    let (folder, point) = (dir.path().join("folder"), dir.path().join("mount"));
    fs::create_dir_all(folder.join("3fs-virt/iovs")).unwrap();
    fs::create_dir_all(folder.join("origin")).unwrap();
    fs::create_dir(&point).unwrap();
    let mount = StandIn::mount(&folder, &point);
    (dir, mount)
}

pub(super) fn three_fs_mount(world: &World) -> Box<dyn Site> {
    let (dir, mount) = three_fs();
    let origin = Arc::new(DirOrigin::open(&mount.point().join("origin")).unwrap());
    let site = Mounted {
        mount,
        origin,
        _dir: dir,
    };
    fill(world, &site);
    Box::new(site)
}

impl Site for Mounted {
    fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.origin) as Arc<dyn Origin>
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        write(&self.mount.point().join("origin").join(object), bytes);
        self.mount.take_events();
    }

    fn lie(&self, origin: Arc<dyn Origin>, object: &str, lie: &Lie) -> Arc<dyn Origin> {
        if let Lie::WrongLength(n) = lie {
            self.mount
                .lose(&format!("origin/{object}"), 0, n >> 8 & 0xFFF);
            return origin;
        }
        Arc::new(Lying::new(origin, object, *lie))
    }

    fn honest(&self) {
        self.mount.heal();
        self.mount.take_events();
    }
}

/// The stand-in's library on its mount: rings that give less, fail, lose chunks and finish in any order.
struct Rings {
    mount: StandIn,
    _dir: tempfile::TempDir,
}

pub(super) fn three_fs_rings(world: &World) -> Box<dyn Site> {
    let (dir, mount) = three_fs();
    let site = Rings { mount, _dir: dir };
    fill(world, &site);
    Box::new(site)
}

impl Site for Rings {
    /// One that has opened no file: a name is taken to mean the same file for half a minute.
    fn origin(&self) -> Arc<dyn Origin> {
        let options = ThreeFsOptions {
            library: three_fs_stand_in::library().into(),
            patience: Duration::from_secs(20),
        };
        let root = self.mount.point().join("origin");
        Arc::new(ThreeFsOrigin::open_with(&root, &options).unwrap())
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        write(&self.mount.point().join("origin").join(object), bytes);
        self.mount.take_events();
    }

    fn lie(&self, origin: Arc<dyn Origin>, object: &str, lie: &Lie) -> Arc<dyn Origin> {
        let Lie::WrongLength(n) = lie else {
            return Arc::new(Lying::new(origin, object, *lie));
        };
        let by = (n >> 8 & 0x3FF) + 1;
        let name = object.rsplit('/').next().unwrap();
        let line = match n % 5 {
            0 => format!("cut {by}"),
            1 => format!("result {by}"),
            2 => "result -5".to_owned(),
            3 => format!("lost {name} 0 {by}"),
            _ => "reverse".to_owned(),
        };
        Control::write(self.mount.point(), &[&line]);
        origin
    }

    fn honest(&self) {
        Control::write(self.mount.point(), &[]);
    }
}
