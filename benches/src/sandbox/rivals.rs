//! The same command in the same tree by `unshare`, crun and runc: from the start of the program to its end.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{HELLO, Pace};
use crate::command;
use crate::error::{Context, Result};

/// A way to run it.
#[derive(Debug)]
pub(crate) struct Rival {
    /// For the table.
    pub(crate) name: &'static str,
    program: &'static str,
    args: fn(&Path, &str) -> Vec<String>,
}

/// All of them. crun and runc get a bundle whose root is the bare tree: no overlay is mounted for them.
pub(crate) const ALL: [Rival; 3] = [
    Rival {
        name: "unshare (all namespaces, chroot)",
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
        name: "crun run",
        program: "crun",
        args: |bundle, id| run(&["--cgroup-manager=disabled"], bundle, id),
    },
    Rival {
        name: "runc run",
        program: "runc",
        args: |bundle, id| run(&[], bundle, id),
    },
];

fn run(flags: &[&str], bundle: &Path, id: &str) -> Vec<String> {
    let bundle = bundle.display().to_string();
    let words = flags
        .iter()
        .copied()
        .chain(["run", "--bundle", &bundle, id]);
    words.map(str::to_owned).collect()
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
    /// Times of so many runs; `None` if the program is not installed.
    ///
    /// # Errors
    /// Where it fails.
    pub(crate) fn times(
        &self,
        bundle: &Path,
        count: usize,
        pace: Pace,
    ) -> Result<Option<Vec<Duration>>> {
        if !command::run(Command::new("which").arg(self.program)).is_ok_and(|path| !path.is_empty())
        {
            return Ok(None);
        }
        let mut times = Vec::with_capacity(count);
        for n in 0..count {
            pace.wait();
            let id = format!("dsec-bench-{}-{n}", std::process::id());
            let began = Instant::now();
            command::run(Command::new(self.program).args((self.args)(bundle, &id)))?;
            times.push(began.elapsed());
        }
        Ok(Some(times))
    }
}
