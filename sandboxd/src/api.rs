//! Requests and replies of the HTTP API. Field names are a contract: clients read them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::container::cgroup::Usage;
use crate::container::protocol::{Exit, TerminalSize};
use crate::disk::Disk;
use crate::network::policy::Rule;

/// `POST /v1/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateRequest {
    /// The lowest layer: `base/name:version` or a digest.
    pub base: String,
    /// A workspace above it.
    #[serde(default)]
    pub workspace: Option<String>,
    /// Toolkits above that, lowest first.
    #[serde(default)]
    pub toolkits: Vec<String>,
    /// What runs it; `container` is the only one so far.
    #[serde(default = "container")]
    #[schema(pattern = "^container$")]
    pub backend: String,
    /// Seconds that it lives, from when it is ready; then it is killed. Without it: until it is killed.
    #[serde(default)]
    #[schema(exclusive_minimum = 0, maximum = 1_000_000_000)]
    pub timeout: Option<f64>,
    /// Seconds without a request after which it is killed.
    #[serde(default)]
    #[schema(exclusive_minimum = 0, maximum = 1_000_000_000)]
    pub idle_timeout: Option<f64>,
    /// MiB of memory.
    #[serde(default)]
    #[schema(minimum = 4, maximum = 16_777_216)]
    pub memory_mb: Option<u64>,
    /// Processors' worth of time.
    #[serde(default)]
    #[schema(minimum = 0.01, maximum = 1024)]
    pub cpus: Option<f64>,
    /// Processes and threads.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4_294_967_295u32)]
    pub pids: Option<u32>,
    /// MiB of disk. Without it the daemon's default, which may be no limit.
    #[serde(default)]
    pub disk_mb: Option<u64>,
    /// What it may reach. Nothing but itself, without it.
    #[serde(default)]
    pub network: Option<Network>,
    /// Environment of everything that runs in it.
    #[serde(default)]
    pub envs: BTreeMap<String, String>,
    /// Who runs things, unless a command says otherwise.
    #[serde(default)]
    pub user: Option<String>,
    /// Where things run, unless a command says otherwise.
    #[serde(default)]
    pub cwd: Option<String>,
    /// Kept and shown.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The same id makes one sandbox, however often it is sent.
    #[serde(default)]
    pub request_id: Option<String>,
}

impl CreateRequest {
    /// A sandbox of one layer.
    pub(crate) fn of(base: String) -> Self {
        Self {
            base,
            workspace: None,
            toolkits: Vec::new(),
            backend: container(),
            timeout: None,
            idle_timeout: None,
            memory_mb: None,
            cpus: None,
            pids: None,
            disk_mb: None,
            network: None,
            envs: BTreeMap::new(),
            user: None,
            cwd: None,
            metadata: BTreeMap::new(),
            request_id: None,
        }
    }
}

fn container() -> String {
    "container".to_owned()
}

/// What a sandbox may reach.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Rules.
    pub allow: Vec<Rule>,
}

/// What a sandbox is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It is being made.
    Creating,
    /// It runs.
    Running,
    /// It stands still; any request makes it go on.
    Paused,
    /// It has ended.
    Gone,
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SandboxInfo {
    /// Its id.
    pub id: String,
    /// What it is doing.
    pub state: State,
    /// Why it ended.
    pub reason: Option<String>,
    /// What runs it.
    pub backend: String,
    /// Its layers as they were named, lowest first.
    pub refs: Vec<String>,
    /// Digests of its layers, lowest first.
    pub layers: Vec<String>,
    /// Milliseconds since 1970 when it was asked for.
    pub created_ms: u64,
    /// Milliseconds since 1970 when it will be killed.
    pub ends_ms: Option<u64>,
    /// As it was asked for.
    pub metadata: BTreeMap<String, String>,
    /// As it was asked for.
    pub request_id: Option<String>,
    /// The sandbox it was forked from.
    pub parent: Option<String>,
    /// Its disk limit, and what keeps it.
    #[serde(default)]
    pub disk: Option<Disk>,
}

/// `GET /v1/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Sandboxes {
    /// By creation.
    pub sandboxes: Vec<SandboxInfo>,
}

/// `GET /v1/sandboxes/ID/usage`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct UsageReply {
    /// What it uses.
    #[serde(flatten)]
    pub usage: Usage,
}

/// `POST /v1/sandboxes/ID/timeout`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeoutRequest {
    /// Seconds from now; `null` = until it is killed.
    #[schema(exclusive_minimum = 0, maximum = 1_000_000_000)]
    pub timeout: Option<f64>,
}

/// `POST /v1/sandboxes/ID/fork`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// How many children.
    #[schema(minimum = 1, maximum = 1000)]
    pub count: u32,
    /// A snapshot of it or a layer that was made of it, by name: children have its files of then. Without it: those of now.
    #[serde(default)]
    pub from: Option<String>,
    /// Seconds that each lives.
    #[serde(default)]
    #[schema(exclusive_minimum = 0, maximum = 1_000_000_000)]
    pub timeout: Option<f64>,
}

/// What became of one child.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum Forked {
    /// It lives.
    Child(Box<SandboxInfo>),
    /// It could not be made; the others were.
    Failed(crate::error::ApiError),
}

/// Answer to a [`ForkRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ForkReply {
    /// One each.
    pub children: Vec<Forked>,
    /// Milliseconds that the parent stood still.
    pub frozen_ms: u64,
    /// Milliseconds that its changes took to copy.
    pub copied_ms: u64,
}

/// `POST /v1/sandboxes/ID/steps`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// What the snapshot is to be called.
    #[schema(min_length = 1, max_length = 128)]
    pub name: String,
}

/// Answer to a [`SnapshotRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SnapshotReply {
    /// The snapshot.
    #[serde(flatten)]
    pub step: Step,
    /// Milliseconds that the sandbox stood still.
    pub frozen_ms: u64,
    /// Milliseconds that its changes took to copy.
    pub copied_ms: u64,
}

/// What a sandbox can be forked from, besides what it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Step {
    /// Its name: of a layer, `axis/name:version`.
    pub name: String,
    /// The layer's digest; a snapshot has none.
    pub layer: Option<String>,
    /// Milliseconds since 1970 when it was made.
    pub created_ms: u64,
}

/// `GET /v1/sandboxes/ID/steps`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Steps {
    /// By time.
    pub steps: Vec<Step>,
}

/// `POST /v1/sandboxes/ID/pack_diff`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PackRequest {
    /// What the layer is to be called: `axis/name:version`.
    pub name: String,
    /// Absolute paths that are left out, with all below.
    #[serde(default)]
    pub scrub: Vec<String>,
}

/// Answer to a [`PackRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct PackReply {
    /// The layer's tag.
    pub name: String,
    /// The layer's digest.
    pub layer: String,
    /// Milliseconds that the sandbox stood still.
    pub frozen_ms: u64,
    /// What `dsec build --json` said.
    pub build: serde_json::Value,
}

/// `POST /v1/sandboxes/ID/execs`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExecRequest {
    /// A line of shell, run by `/bin/sh -c` (or `args`).
    pub cmd: Option<String>,
    /// Program and arguments (or `cmd`).
    pub args: Vec<String>,
    /// Added to the sandbox's environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    pub cwd: Option<String>,
    /// User.
    pub user: Option<String>,
    /// Seconds until everything that it started is killed. Without it there is no limit but the sandbox's.
    #[schema(exclusive_minimum = 0, maximum = 1_000_000_000)]
    pub timeout: Option<f64>,
    /// Whether input follows (`POST …/execs/EXEC/stdin`).
    pub stdin: bool,
    /// A terminal in place of pipes.
    pub pty: Option<TerminalSize>,
    /// The same id runs once, however often it is sent; later ones get what it said. Made up if it is missing.
    pub request_id: Option<String>,
    /// Reply at once.
    pub background: bool,
    /// Reply with frames as they come, see `docs/sandbox.md`.
    pub stream: bool,
}

/// How an exec ended, with what is kept of its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ExecReply {
    /// Its id, to attach to.
    pub exec_id: String,
    /// Its process, as the sandbox sees it.
    pub pid: i32,
    /// Whether it had been started before.
    pub again: bool,
    /// Its end; all of it is missing if it runs in the background.
    #[serde(flatten)]
    #[schema(value_type = ExecEnd)]
    pub exit: Option<Exit>,
    /// Head and tail of standard output, base64.
    pub stdout: String,
    /// Head and tail of standard error, base64.
    pub stderr: String,
    /// Bytes were left out between head and tail.
    pub truncated: bool,
}

/// What an [`ExecReply`] has of an [`Exit`], for its description: everything, or nothing.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "only its description is used")]
struct ExecEnd {
    /// How it ended.
    outcome: Option<crate::container::protocol::Outcome>,
    /// The status: as a shell shows it (128 + signal).
    exit_code: Option<i32>,
    /// The signal that ended it.
    signal: Option<i32>,
    /// Bytes that standard output was in all.
    stdout_bytes: Option<u64>,
    /// Bytes that standard error was in all.
    stderr_bytes: Option<u64>,
    /// A process that it left behind can still write to its output.
    open_streams: Option<bool>,
    /// Why it did not start, or failed.
    message: Option<String>,
    /// Milliseconds from start to end.
    duration_ms: Option<u64>,
}

/// `POST …/execs/EXEC/signal`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    /// The signal's number.
    #[schema(minimum = 1, maximum = 64)]
    pub signal: i32,
    /// Kill everything that it started, in place of a signal to its main process.
    #[serde(default)]
    pub tree: bool,
}
