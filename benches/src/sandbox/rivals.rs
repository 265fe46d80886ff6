//! The same command in the same tree by `unshare`, crun and runc: from the start of the program to its end.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{HELLO, Pace};
use crate::command;
use crate::error::{Context, Result};
use crate::say::progress;

/// A way to run it.
#[derive(Debug)]
pub(crate) struct Rival {
    /// For the table.
    pub(crate) name: &'static str,
    /// Without this program it is left out.
    needs: &'static str,
    program: &'static str,
    args: fn(&Path, &str) -> Vec<String>,
}

/// All of them. crun and runc get a bundle whose root is the bare tree: no overlay is mounted for them.
pub(crate) const ALL: [Rival; 3] = [
    Rival {
        name: "unshare (all namespaces, chroot)",
        needs: "unshare",
        program: "unshare",
        args: |bundle, _| {
            let flags = "--mount --pid --ipc --uts --net --cgroup --user --map-root-user --fork";
            let flags = flags.split(' ').map(str::to_owned);
            let tree = bundle.join("rootfs").display().to_string();
            flags
                .chain(["chroot".to_owned(), tree])
                .chain(HELLO.map(str::to_owned))
                .collect()
        },
    },
    Rival {
        name: "crun run (in a mount namespace that shows cgroup v2 alone)",
        needs: "crun",
        program: "unshare",
        // crun refuses a hierarchy of both versions.
        args: |bundle, id| {
            let line = "mount -t cgroup2 none /sys/fs/cgroup && exec crun --cgroup-manager=disabled \"$@\"";
            let words = ["--mount", "sh", "-c", line, "sh"].map(str::to_owned);
            words.into_iter().chain(run(bundle, id)).collect()
        },
    },
    Rival {
        name: "runc run",
        needs: "runc",
        program: "runc",
        args: |bundle, id| run(bundle, id),
    },
];

fn run(bundle: &Path, id: &str) -> Vec<String> {
    let bundle = bundle.display().to_string();
    ["run", "--bundle", &bundle, id].map(str::to_owned).into()
}

/// Makes `folder` a bundle of the tree: `runc spec`'s own, with our command and without a terminal.
///
/// # Errors
/// Where runc is missing or a file cannot be written.
pub(crate) fn bundle(folder: &Path, tree: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).on("make", folder)?;
    command::run(Command::new("runc").arg("spec").current_dir(folder))?;
    let path = folder.join("config.json");
    let text = std::fs::read(&path).on("read", &path)?;
    let mut spec: serde_json::Value = serde_json::from_slice(&text).on("understand", &path)?;
    if let Some(process) = spec.get_mut("process") {
        *process = merged(
            process.take(),
            &serde_json::json!({"terminal": false, "args": HELLO}),
        );
    }
    if let Some(root) = spec.get_mut("root") {
        *root = serde_json::json!({"path": "rootfs", "readonly": true});
    }
    std::fs::write(&path, spec.to_string()).on("write", &path)?;
    let link = folder.join("rootfs");
    std::fs::rename(tree, &link).on("move", tree)
}

fn merged(mut object: serde_json::Value, with: &serde_json::Value) -> serde_json::Value {
    if let (Some(object), Some(with)) = (object.as_object_mut(), with.as_object()) {
        object.extend(with.clone());
    }
    object
}

impl Rival {
    /// Times of so many runs; `None` if the program is not installed or does not run here, which is said.
    ///
    /// # Errors
    /// None so far.
    pub(crate) fn times(
        &self,
        bundle: &Path,
        count: usize,
        pace: Pace,
    ) -> Result<Option<Vec<Duration>>> {
        if !command::run(Command::new("which").arg(self.needs)).is_ok_and(|path| !path.is_empty()) {
            return Ok(None);
        }
        let mut times = Vec::with_capacity(count);
        for n in 0..count {
            pace.wait();
            let id = format!("dsec-bench-{}-{n}", std::process::id());
            let began = Instant::now();
            let ran = command::run(Command::new(self.program).args((self.args)(bundle, &id)));
            if let Err(error) = ran {
                progress!("{} does not run here: {error}", self.name);
                return Ok(None);
            }
            times.push(began.elapsed());
        }
        Ok(Some(times))
    }
}
