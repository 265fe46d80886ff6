//! `dsec sandbox …`: each command is a request or two to `sandboxd`.

pub(crate) mod follow;
pub(crate) mod http;
mod keys;
mod shell;
mod steps;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use http_body_util::BodyExt as _;
use hyper::Method;
use serde_json::{Value, json};

use super::Failure;
use crate::cli::parse_label;
use crate::output;
use http::{Client, Pieces, quoted};

/// What a sandbox is made of and may use.
#[derive(Debug, Args)]
pub(crate) struct MakeArgs {
    /// The lowest layer: `base/name:version` or a digest.
    #[arg(long, value_name = "REF")]
    base: String,
    /// A workspace above it.
    #[arg(long, value_name = "REF")]
    workspace: Option<String>,
    /// A toolkit above that; can be given several times.
    #[arg(long, value_name = "REF")]
    toolkit: Vec<String>,
    /// MiB of memory.
    #[arg(long, value_name = "MIB")]
    memory_mb: Option<u64>,
    /// Processors' worth of time.
    #[arg(long, value_name = "N")]
    cpus: Option<f64>,
    /// MiB of disk.
    #[arg(long, value_name = "MIB")]
    disk_mb: Option<u64>,
    /// Something that it may reach, `ADDRESS|RANGE|NAME:PORT[/udp]`; can be given several times. Without it: nothing.
    #[arg(long, value_name = "TO:PORT", value_parser = parse_rule)]
    allow: Vec<Value>,
    /// Environment, `NAME=VALUE`; can be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_label)]
    env: Vec<(String, String)>,
    /// Who runs things.
    #[arg(long)]
    user: Option<String>,
    /// Where things run.
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
}

/// `10.0.0.0/8:8000-8100/udp` as a rule.
fn parse_rule(text: &str) -> Result<Value, String> {
    let (to, port) = text
        .rsplit_once(':')
        .ok_or("`TO:PORT` is expected, for example `pypi.org:443` or `10.0.0.0/8:53/udp`")?;
    let (port, protocol) = port.split_once('/').unwrap_or((port, "tcp"));
    Ok(json!({"to": to, "port": port, "protocol": protocol}))
}

impl MakeArgs {
    /// The request for a sandbox that lives so long.
    pub(crate) fn request(&self, lifetime: Option<f64>) -> Value {
        let envs: serde_json::Map<String, Value> = self
            .env
            .iter()
            .map(|(name, value)| (name.clone(), value.clone().into()))
            .collect();
        json!({
            "base": self.base, "workspace": self.workspace, "toolkits": self.toolkit,
            "memory_mb": self.memory_mb, "cpus": self.cpus, "envs": envs,
            "user": self.user, "cwd": self.cwd, "timeout": lifetime,
            "network": {"allow": self.allow}, "disk_mb": self.disk_mb,
        })
    }
}

/// A command to run.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Seconds until everything that it started is killed; exit status 124 then.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<f64>,
    /// Pass standard input on.
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Program and arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// `dsec sandbox`.
#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// Make a sandbox and print its id.
    #[command(
        after_help = "Examples:\n  dsec sandbox create --base base/python:3.11 --workspace workspace/repo:1 --timeout 3600\n  dsec sandbox create --base base/debian:12 --memory-mb 2048 --disk-mb 1024 --allow pypi.org:443"
    )]
    Create {
        #[command(flatten)]
        make: MakeArgs,
        /// Seconds that it lives.
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<f64>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// List sandboxes.
    Ls {
        /// Those that have ended, too.
        #[arg(long)]
        all: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run a command; its exit status becomes this command's.
    #[command(
        after_help = "Examples:\n  dsec sandbox exec sb-1f6a -- pytest -q\n  dsec sandbox exec --timeout 60 -i sb-1f6a -- sh -c 'cat > /w/input' < input"
    )]
    Exec {
        /// The sandbox.
        id: String,
        #[command(flatten)]
        exec: ExecArgs,
    },
    /// Open a shell at a terminal; its exit status becomes this command's.
    Shell {
        /// The sandbox.
        id: String,
        /// Who it runs as.
        #[arg(long)]
        user: Option<String>,
        /// Where it begins.
        #[arg(long, value_name = "DIR")]
        cwd: Option<String>,
        /// Program and arguments in place of a login shell (`bash`, or `sh` where there is none).
        #[arg(last = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Copy a file into or out of a sandbox: one of both is `ID:PATH`.
    #[command(
        after_help = "Examples:\n  dsec sandbox cp data.bin sb-1f6a:/w/data.bin\n  dsec sandbox cp sb-1f6a:/w/report.xml report.xml"
    )]
    Cp {
        /// From.
        from: String,
        /// To.
        to: String,
    },
    /// Let a sandbox stand still and give its memory back; the next request makes it go on.
    Pause {
        /// The sandbox.
        id: String,
    },
    /// Let a sandbox go on.
    Resume {
        /// The sandbox.
        id: String,
    },
    /// Publish what a sandbox changed as a layer.
    #[command(
        after_help = "Example:\n  dsec sandbox pack-diff sb-1f6a workspace/repo:step-17 --scrub /root/.cache"
    )]
    PackDiff {
        /// The sandbox.
        id: String,
        /// The layer's name: `axis/name:version`.
        name: String,
        /// An absolute path that is left out; can be given several times.
        #[arg(long, value_name = "PATH")]
        scrub: Vec<String>,
    },
    /// Make children with the files that a sandbox has now, or had, and print their ids.
    #[command(
        after_help = "Examples:\n  dsec sandbox fork sb-1f6a 8\n  dsec sandbox fork sb-1f6a 8 --from workspace/repo:step-17"
    )]
    Fork {
        /// The sandbox.
        id: String,
        /// How many.
        #[arg(default_value_t = 1)]
        count: u32,
        /// A snapshot of it, or a layer that was made of it (`dsec sandbox steps`): children have its files of then.
        #[arg(long, value_name = "STEP")]
        from: Option<String>,
    },
    /// Keep the files that a sandbox has now under a name, to fork from, for as long as it lives.
    #[command(
        after_help = "Example:\n  dsec sandbox snapshot sb-1f6a tested && dsec sandbox fork sb-1f6a 4 --from tested"
    )]
    Snapshot {
        /// The sandbox.
        id: String,
        /// What the snapshot is to be called; one of that name is replaced.
        name: String,
    },
    /// List what a sandbox can be forked from: its snapshots, and the layers that were made of it.
    Steps {
        /// The sandbox.
        id: String,
        /// Forget this one; a layer stays published.
        #[arg(long, value_name = "STEP")]
        forget: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// End sandboxes.
    Kill {
        /// The sandboxes.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Show what a command has printed (the kept part), and follow it to its end.
    Logs {
        /// The sandbox.
        id: String,
        /// The command's id; without one, all are listed.
        exec: Option<String>,
    },
    /// Show what sandboxes use.
    Top,
    /// Make an API key, and the line that lets it in (`sandboxd --api-keys FILE`). The key is shown once and kept nowhere.
    NewKey {
        /// Whose: a project sees its own sandboxes only.
        project: String,
        /// Add the line to this file (it is made, for its owner alone); without it, the line goes to standard error.
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

/// Runs something that waits for a daemon.
///
/// # Errors
/// Its own.
pub(crate) fn wait<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(work);
    // Standard input may still be read by a thread that cannot be woken.
    runtime.shutdown_background();
    done
}

/// See the head of this file.
///
/// # Errors
/// What the daemon said, or why it was not reached.
pub(crate) fn run(command: &SandboxCommand) -> Result<ExitCode, Failure> {
    wait(carry_out(&Client::from_env(), command))
}

pub(crate) fn path_of(id: &str, what: &str) -> String {
    format!("/v1/sandboxes/{}{what}", quoted(id))
}

async fn carry_out(client: &Client, command: &SandboxCommand) -> Result<ExitCode, Failure> {
    let post = |path: String, body: Value| async move {
        client.json(Method::POST, &path, Some(&body)).await
    };
    match command {
        SandboxCommand::Create {
            make,
            timeout,
            json,
        } => {
            let made = post("/v1/sandboxes".to_owned(), make.request(*timeout)).await?;
            if *json {
                output::json(&made);
            } else {
                output::line(text(&made, "id"));
            }
        }
        SandboxCommand::Ls { all, json } => list(client, *all, *json).await?,
        SandboxCommand::Exec { id, exec } => return execute(client, id, exec).await,
        SandboxCommand::Shell {
            id,
            user,
            cwd,
            command,
        } => return shell::run(client, id, command, (user.as_deref(), cwd.as_deref())).await,
        SandboxCommand::Cp { from, to } => copy(client, from, to).await?,
        SandboxCommand::Pause { id } => drop(post(path_of(id, "/pause"), json!({})).await?),
        SandboxCommand::Resume { id } => drop(post(path_of(id, "/resume"), json!({})).await?),
        SandboxCommand::PackDiff { id, name, scrub } => {
            let body = json!({"name": name, "scrub": scrub});
            let packed = post(path_of(id, "/pack_diff"), body).await?;
            output::line(text(&packed, "layer"));
        }
        SandboxCommand::Fork { id, count, from } => {
            let body = json!({"count": count, "from": from});
            return Ok(steps::children(&post(path_of(id, "/fork"), body).await?));
        }
        SandboxCommand::Snapshot { id, name } => {
            drop(post(path_of(id, "/steps"), json!({"name": name})).await?);
        }
        SandboxCommand::Steps { id, forget, json } => match forget {
            Some(name) => steps::forget(client, id, name).await?,
            None => steps::list(client, id, *json).await?,
        },
        SandboxCommand::Kill { ids } => {
            for id in ids {
                client.json(Method::DELETE, &path_of(id, ""), None).await?;
            }
        }
        SandboxCommand::Logs { id, exec } => return logs(client, id, exec.as_deref()).await,
        SandboxCommand::Top => top(client).await?,
        SandboxCommand::NewKey { project, file } => keys::make(project, file.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

async fn sandboxes(client: &Client) -> Result<Vec<Value>, Failure> {
    let mut listed = client.json(Method::GET, "/v1/sandboxes", None).await?;
    let found = listed.get_mut("sandboxes").and_then(Value::as_array_mut);
    Ok(found.map(std::mem::take).unwrap_or_default())
}

async fn list(client: &Client, all: bool, json: bool) -> Result<(), Failure> {
    let mut found = sandboxes(client).await?;
    found.retain(|s| all || text(s, "state") != "gone");
    if json {
        output::json(&found);
        return Ok(());
    }
    for sandbox in &found {
        let refs = sandbox.get("refs").and_then(Value::as_array);
        let refs: Vec<&str> = refs
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let (id, state, reason) = (
            text(sandbox, "id"),
            text(sandbox, "state"),
            text(sandbox, "reason"),
        );
        let reason = if reason.is_empty() {
            String::new()
        } else {
            format!("  ({reason})")
        };
        output::line(&format!("{id}  {state}  {}{reason}", refs.join(" + ")));
    }
    Ok(())
}

/// Runs a command in a sandbox.
///
/// # Errors
/// As for [`run`].
pub(crate) async fn execute(
    client: &Client,
    id: &str,
    exec: &ExecArgs,
) -> Result<ExitCode, Failure> {
    // Named here: if the connection breaks off, asking again attaches and runs nothing twice.
    let name = format!("cli-{}-{}", std::process::id(), nanos());
    let body = json!({
        "args": exec.command, "timeout": exec.timeout, "stdin": exec.interactive,
        "stream": true, "request_id": name,
    });
    let path = path_of(id, "/execs");
    let response = client.stream(Method::POST, &path, Some(&body)).await?;
    if exec.interactive {
        let (client, path) = (
            client.clone(),
            path_of(id, &format!("/execs/{name}/stdin?eof=true")),
        );
        tokio::spawn(async move {
            let input = Pieces::read(std::io::stdin());
            // A program that has ended takes no more input: its end says so.
            client.upload(Method::POST, &path, input).await.ok();
        });
    }
    Ok(follow::status(&follow::follow(response).await?))
}

fn nanos() -> u128 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| d.as_nanos())
}

async fn logs(client: &Client, id: &str, exec: Option<&str>) -> Result<ExitCode, Failure> {
    if let Some(exec) = exec {
        let path = path_of(id, &format!("/execs/{}/stream", quoted(exec)));
        let response = client.stream(Method::GET, &path, None).await?;
        return Ok(follow::status(&follow::follow(response).await?));
    }
    let execs = client
        .json(Method::GET, &path_of(id, "/execs"), None)
        .await?;
    for exec in execs.as_array().into_iter().flatten() {
        let argv = exec.get("argv").and_then(Value::as_array);
        let argv: Vec<&str> = argv
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let end = exec.get("exit").map_or("", |exit| text(exit, "outcome"));
        let end = if end.is_empty() { "running" } else { end };
        output::line(&format!(
            "{}  {end}  {}",
            text(exec, "exec_id"),
            argv.join(" ")
        ));
    }
    Ok(ExitCode::SUCCESS)
}

async fn top(client: &Client) -> Result<(), Failure> {
    for sandbox in sandboxes(client).await? {
        if text(&sandbox, "state") == "gone" {
            continue;
        }
        let id = text(&sandbox, "id");
        let used = client
            .json(Method::GET, &path_of(id, "/usage"), None)
            .await?;
        let number = |name: &str| used.get(name).and_then(Value::as_u64).unwrap_or(0);
        output::line(&format!(
            "{id}  {}  {} processes, {} killed for lack of memory",
            output::bytes(number("memory_bytes")),
            number("pids"),
            number("oom_kills")
        ));
    }
    Ok(())
}

async fn copy(client: &Client, from: &str, to: &str) -> Result<(), Failure> {
    let inside = |name: &str| {
        let (id, path) = name.split_once(':')?;
        (id.starts_with("sb-") && path.starts_with('/')).then(|| {
            let at = format!("/files?path={}", quoted(path));
            path_of(id, &at)
        })
    };
    match (inside(from), inside(to)) {
        (None, Some(path)) => {
            let source = Pieces::read(File::open(from)?);
            client.upload(Method::PUT, &path, source).await
        }
        (Some(path), None) => {
            let response = client.stream(Method::GET, &path, None).await?;
            // Whole or not at all: a download that breaks off leaves what was there.
            let target = Path::new(to);
            let folder = target.parent().filter(|p| !p.as_os_str().is_empty());
            let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
            let mut body = response.into_body();
            while let Some(frame) = body.frame().await {
                if let Ok(data) = frame?.into_data() {
                    file.write_all(&data)?;
                }
            }
            file.persist(target)?;
            Ok(())
        }
        _ => Err("one of both is `ID:PATH` with an absolute path, the other a file here".into()),
    }
}
