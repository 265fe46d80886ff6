//! `s3://` from end to end, on SeaweedFS: publish, list, verify, mount, remove. The program comes from PyPI by `tools/setup`.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use imgstore::credentials::environment::Environment;
use imgstore::origin::s3::{S3Address, S3Origin};
use imgstore::origin::{Created, Origin as _, OriginError};

use crate::daemon::Layerd;
use crate::world::{World, dsec_with, failed, json, noise, ok, rich_tree, same_contents, sh};

/// Longest wait for the server to answer.
const START_MAX: Duration = Duration::from_secs(60);
const KEY: &str = "AKIDWEED";
const SECRET: &str = "weed-s3cr3t";

/// A running server; it ends with the value.
struct Weed {
    child: Child,
    s3: u16,
}

fn program() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let weed = root.join("target/test-tools/seaweedfs/bin/weed");
    assert!(
        weed.try_exists().unwrap(),
        "`{}` is missing; run `tools/setup check` first",
        weed.display()
    );
    weed
}

/// Ports that are free now. The gRPC ports of SeaweedFS are 10,000 above unless they are named.
fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|l| l.local_addr().unwrap().port())
}

impl Weed {
    fn start(world: &World) -> Self {
        let dir = world.folder("weed");
        let config = format!(
            r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{KEY}","secretKey":"{SECRET}"}}],
              "actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
        );
        fs::write(dir.join("s3.json"), config).unwrap();
        let [
            master,
            master_rpc,
            volume,
            volume_rpc,
            filer,
            filer_rpc,
            s3,
            s3_rpc,
        ] = free_ports();
        let port = |name: &str, n: u16| format!("-{name}={n}");
        let child = Command::new(program())
            .args([
                "-logtostderr=true",
                "server",
                "-s3",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
            ])
            .args(["-volume.max=100", "-master.volumeSizeLimitMB=64", "-dir=."])
            .args([
                port("master.port", master),
                port("master.port.grpc", master_rpc),
            ])
            .args([
                port("volume.port", volume),
                port("volume.port.grpc", volume_rpc),
            ])
            .args([
                port("filer.port", filer),
                port("filer.port.grpc", filer_rpc),
            ])
            .args([port("s3.port", s3), port("s3.port.grpc", s3_rpc)])
            .arg("-s3.config=s3.json")
            .current_dir(&dir)
            .env("HOME", &dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut weed = Self { child, s3 };
        let deadline = Instant::now() + START_MAX;
        let log = || fs::read_to_string(dir.join("log")).unwrap_or_default();
        while TcpStream::connect(("127.0.0.1", s3)).is_err() {
            assert!(
                weed.child.try_wait().unwrap().is_none(),
                "weed ended: {}",
                log()
            );
            assert!(Instant::now() < deadline, "weed does not listen: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
        // The bucket, through the file server behind; it takes some time until there are volumes.
        let made =
            format!("curl -sf -X POST 'http://127.0.0.1:{filer}/buckets/layers/' >/dev/null");
        let make = || Command::new("sh").args(["-c", &made]).status().unwrap();
        while !make().success() {
            assert!(Instant::now() < deadline, "no bucket: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
        weed
    }

    fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.s3)
    }
}

impl Drop for Weed {
    fn drop(&mut self) {
        // It takes half a minute to end by itself.
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn layers_live_in_a_bucket_of_seaweedfs() {
    let world = World::new();
    let tree = rich_tree(&world, "tree");
    fs::write(tree.join("usr/huge"), noise(9, 20 << 20)).unwrap();
    let weed = Weed::start(&world);
    let endpoint = weed.endpoint();
    let env = [
        ("AWS_ENDPOINT_URL", endpoint.as_str()),
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
    ];
    let origin = "s3://layers/team/x";
    let on = |args: &[&str]| dsec_with(&world, &env, &[args, &["--origin", origin]].concat());
    let build = [
        "build",
        "tree",
        "--axis",
        "base",
        "--name",
        "t",
        "--json",
        "--version",
    ];
    let built = json(&ok(on(&[&build[..], &["1"]].concat())));
    let local = world.build("tree", "origin", &[]);
    assert_eq!(built["layer"], local["layer"]);
    let again = json(&ok(on(&[&build[..], &["2"]].concat())));
    assert_eq!(again["bytes_stored"], 0);
    assert!(ok(on(&["layers"])).contains("base/t:2"));
    ok(on(&["verify", "base/t:1"]));
    let wrong = [env[0], env[1], ("AWS_SECRET_ACCESS_KEY", "not-this-one")];
    let args = ["layers", "--origin", origin];
    let error = failed(&dsec_with(&world, &wrong, &args), 1);
    assert!(
        error.contains("~/.aws/credentials") && !error.contains("not-this-one"),
        "{error}"
    );

    let daemon = Layerd::start_with(&world, origin, &env);
    let mnt = world.folder("mnt");
    ok(daemon.run(&["mount", "base/t:1", "mnt"]));
    let kinds = "find . -printf '%p %y %m %U:%G %T@ %l\\n' | sort";
    assert_eq!(sh(&mnt, kinds), sh(&tree, kinds));
    same_contents(&tree.join("usr/lib"), &mnt.join("usr/lib"));
    assert!(fs::read(mnt.join("usr/huge")).unwrap() == fs::read(tree.join("usr/huge")).unwrap());
    assert_eq!(daemon.stats()["total"]["verify_failures"], 0);
    ok(daemon.run(&["umount", "mnt"]));

    // What collecting garbage asks of an origin.
    let address = S3Address::parse("layers/team/x").unwrap();
    let origin = S3Origin::open(&address, &Environment::of(env)).unwrap();
    let infos = origin.list_info("packs/").unwrap();
    assert!(!infos.is_empty());
    for info in infos {
        assert_eq!(origin.size(&info.name).unwrap(), info.size);
        let age = SystemTime::now()
            .duration_since(info.modified)
            .unwrap_or_default();
        assert!(age < Duration::from_secs(600), "{age:?}");
    }
    let lease = "leases/one.json";
    assert_eq!(origin.create(lease, &mut &b"1"[..]).unwrap(), Created::New);
    assert_eq!(
        origin.create(lease, &mut &b"2"[..]).unwrap(),
        Created::Existed
    );
    assert_eq!(origin.fetch_all(lease, 9).unwrap(), b"1");
    origin.remove(lease).unwrap();
    origin.remove(lease).unwrap();
    assert!(matches!(
        origin.size(lease),
        Err(OriginError::NotFound { .. })
    ));
    assert_eq!(origin.list("leases/").unwrap(), Vec::<String>::new());
}
