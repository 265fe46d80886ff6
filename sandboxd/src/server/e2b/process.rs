//! `process.Process` of envd: commands, terminals, and what is sent to them.
//!
//! A process is known by its number; ours by an id, so that each request looks the number up among what runs. The tag that a
//! client may give is kept in the id.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::ended;
use super::super::execs::{PIECE_BYTES, launch, lost};
use super::App;
use super::access::Envd;
use super::connect::{self, Call, RpcError};
use super::noted::{native, noted, noted_with};
use crate::api::ExecRequest;
use crate::backend::Door;
use crate::container::link::{Event, Link};
use crate::container::protocol::{
    Answer, ExecInfo, ExecSpec, Exit, Outcome, Request, TerminalSize, kind,
};
use crate::ids;
use crate::sandboxes::InUse;
use crate::trajectory::Begun;

/// What ids of processes that were started here begin with.
const PREFIX: &str = "e2b-";
/// From no byte on: only what comes.
const NOTHING_YET: u64 = u64::MAX;
/// SIGKILL ends all that a process started: that is what callers mean by it.
const SIGKILL: i32 = 9;
/// What a terminal takes for the end of input.
const END_OF_TRANSMISSION: u8 = 4;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    cmd: String,
    args: Vec<String>,
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Pty {
    size: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Size {
    cols: u32,
    rows: u32,
}

impl Pty {
    fn size(&self) -> Result<TerminalSize, RpcError> {
        let wrong = || RpcError::invalid("a terminal's size is 1 to 65535 columns and rows");
        let size = self.size.as_ref().ok_or_else(wrong)?;
        let number = |n: u32| u16::try_from(n).ok().filter(|n| *n > 0).ok_or_else(wrong);
        Ok(TerminalSize {
            cols: number(size.cols)?,
            rows: number(size.rows)?,
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Start {
    process: Config,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Selector {
    pid: Option<i32>,
    tag: Option<String>,
}

/// All messages that name a process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Selected {
    process: Selector,
    pty: Option<Pty>,
    input: Input,
    signal: Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

/// `POST /process.Process/{method}`.
pub(in crate::server) async fn call(
    State(app): State<App>,
    Path(method): Path<String>,
    envd: Envd,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let call = match Call::read(&headers, &body) {
        Ok(call) => call,
        Err(error) => return connect::unary(Err(error)),
    };
    match (&*method, call.streams) {
        ("Start", true) => match start(&app, &envd, &call).await {
            Ok(process) => connect::stream(events(&app, &envd, process, &call, None)),
            Err(error) => connect::failed_stream(error),
        },
        ("Connect", true) => match attach(&app, &envd, &call).await {
            Ok(process) => {
                let until = call.timeout.map(|timeout| Instant::now() + timeout);
                connect::stream(events(&app, &envd, process, &call, until))
            }
            Err(error) => connect::failed_stream(error),
        },
        (_, true) => connect::failed_stream(RpcError::unknown(&method)),
        (method, false) => connect::unary(simple(&app, &envd, method, &call).await),
    }
}

/// A process that runs, and what comes from it.
struct Process {
    exec_id: String,
    link: Link,
    pid: i32,
    pty: bool,
}

async fn start(app: &App, envd: &Envd, call: &Call) -> Result<Process, RpcError> {
    let asked: Start = call.message()?;
    let record = envd.sandbox.record();
    let mut env = record.envs;
    let template = record.info.refs.join("+");
    for (name, value) in [
        ("E2B_SANDBOX", "true"),
        ("E2B_SANDBOX_ID", &record.info.id),
        ("E2B_TEMPLATE_ID", &template),
    ] {
        env.entry(name.to_owned())
            .or_insert_with(|| value.to_owned());
    }
    env.extend(asked.process.envs);
    let cwd = asked
        .process
        .cwd
        .filter(|cwd| !cwd.is_empty())
        .unwrap_or(record.cwd);
    let timeout = call
        .timeout
        .map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX));
    let pty = asked.pty.as_ref().map(Pty::size).transpose()?;
    if asked.process.cmd.is_empty() {
        return Err(RpcError::invalid("`process.cmd`: a program is expected"));
    }
    let mut spec = ExecSpec {
        exec_id: format!(
            "{PREFIX}{}-{}",
            ids::random(),
            asked.tag.unwrap_or_default()
        ),
        argv: std::iter::once(asked.process.cmd)
            .chain(asked.process.args)
            .collect(),
        env,
        cwd: if cwd.is_empty() { "~".to_owned() } else { cwd },
        user: envd.user(),
        timeout_ms: timeout,
        stdin: asked.stdin.unwrap_or(true),
        pty,
        open_files: 0,
    };
    let asked = ExecRequest {
        args: spec.argv.clone(),
        envs: spec.env.clone(),
        cwd: Some(spec.cwd.clone()),
        user: Some(spec.user.clone()),
        timeout: call.timeout.map(|timeout| timeout.as_secs_f64()),
        stdin: spec.stdin,
        pty,
        ..ExecRequest::default()
    };
    // Its name is new, so nothing of that name was ever written down.
    let Begun::New(ticket) = ended::begin(&app.service, &envd.sandbox, &mut spec, asked).await?
    else {
        return Err(RpcError::new("internal", "this process was begun before"));
    };
    match launch(&app.service, &envd.sandbox, spec, (true, false)).await {
        Ok((link, Answer::Started { pid, .. })) => {
            // Written down to its end, whether or not the client follows it so far.
            ended::record(&app.service, &envd.sandbox, &ticket);
            let pty = pty.is_some();
            Ok(Process {
                exec_id: ticket.request_id,
                link,
                pid,
                pty,
            })
        }
        Ok((_, other)) => {
            app.service.trajectory().leave_open(&ticket);
            Err(RpcError::unexpected(&other))
        }
        Err(error) => {
            let error = ended::not_launched(&app.service, &ticket, &error, false).await;
            Err(error.into())
        }
    }
}

async fn attach(app: &App, envd: &Envd, call: &Call) -> Result<Process, RpcError> {
    let asked: Selected = call.message()?;
    let socket = app.service.use_it(&envd.sandbox).await?;
    let exec = find(&socket, &asked.process).await?;
    let mut link = Link::connect(&socket).await?;
    let request = Request::Attach {
        exec_id: exec.exec_id.clone(),
        stdout_from: NOTHING_YET,
        stderr_from: NOTHING_YET,
        stream: true,
    };
    match link.request(&request).await? {
        Answer::Started { pid, .. } => Ok(Process {
            exec_id: exec.exec_id,
            link,
            pid,
            pty: exec.pty,
        }),
        other => Err(RpcError::unexpected(&other)),
    }
}

async fn running(socket: &Door) -> Result<Vec<ExecInfo>, RpcError> {
    match Link::connect(socket).await?.request(&Request::List).await? {
        Answer::Execs { execs } => Ok(execs.into_iter().filter(|e| e.exit.is_none()).collect()),
        other => Err(RpcError::unexpected(&other)),
    }
}

fn tag(exec: &ExecInfo) -> Option<&str> {
    let (_, tag) = exec.exec_id.strip_prefix(PREFIX)?.split_once('-')?;
    (!tag.is_empty()).then_some(tag)
}

async fn find(socket: &Door, selector: &Selector) -> Result<ExecInfo, RpcError> {
    let wanted = |exec: &ExecInfo| match (selector.pid, &selector.tag) {
        (Some(pid), _) => exec.pid == pid,
        (None, Some(wanted)) => tag(exec) == Some(wanted),
        (None, None) => false,
    };
    let found = running(socket).await?.into_iter().find(wanted);
    found.ok_or_else(|| {
        let name = match (selector.pid, &selector.tag) {
            (Some(pid), _) => format!("number {pid}"),
            (None, tag) => format!("tag `{}`", tag.as_deref().unwrap_or_default()),
        };
        RpcError::new(
            "not_found",
            format!("no process with {name} runs in this sandbox"),
        )
    })
}

/// What a stream of events is made from.
struct Following {
    link: Link,
    keepalive: Duration,
    until: Option<Instant>,
    pty: bool,
    _used: InUse,
}

fn events(
    app: &App,
    envd: &Envd,
    process: Process,
    call: &Call,
    until: Option<Instant>,
) -> impl Stream<Item = Result<Value, RpcError>> + Send + 'static {
    let Process {
        exec_id,
        link,
        pid,
        pty,
    } = process;
    let following = Following {
        link,
        keepalive: call.keepalive,
        until,
        pty,
        _used: InUse::of(&envd.sandbox),
    };
    let (service, sandbox) = (Arc::clone(&app.service), Arc::clone(&envd.sandbox));
    let rest = futures_util::stream::unfold(Some(following), move |following| {
        let (service, sandbox) = (Arc::clone(&service), Arc::clone(&sandbox));
        let exec_id = exec_id.clone();
        async move {
            let mut following = following?;
            let next = Instant::now() + following.keepalive;
            let wake = following.until.map_or(next, |until| until.min(next));
            let said = match tokio::time::timeout_at(wake, following.link.next()).await {
                Err(_) if following.until.is_some_and(|until| until <= Instant::now()) => {
                    let message = "the time for following this process is over; it runs on";
                    return Some((Err(RpcError::new("deadline_exceeded", message)), None));
                }
                Err(_) => json!({"keepalive": {}}),
                Ok(Ok(Event::Stdout(_, bytes))) => {
                    let stream = if following.pty { "pty" } else { "stdout" };
                    json!({"data": {stream: STANDARD.encode(bytes)}})
                }
                Ok(Ok(Event::Stderr(_, bytes))) => {
                    json!({"data": {"stderr": STANDARD.encode(bytes)}})
                }
                Ok(Ok(Event::Exit(exit))) => {
                    ended::written_down(&service, &sandbox, &exec_id).await;
                    return Some((end_of(&exit), None));
                }
                Ok(Ok(other)) => return Some((Err(RpcError::unexpected(&other)), None)),
                Ok(Err(error)) => {
                    let exit = lost(&service, &sandbox, &error.to_string()).await;
                    ended::written_down(&service, &sandbox, &exec_id).await;
                    return Some((end_of(&exit), None));
                }
            };
            Some((Ok(json!({"event": said})), Some(following)))
        }
    });
    let begun = json!({"event": {"start": {"pid": pid}}});
    futures_util::stream::once(async { Ok(begun) }).chain(rest)
}

/// The last event, or the error that stands for it.
fn end_of(exit: &Exit) -> Result<Value, RpcError> {
    let message = exit.message.clone().unwrap_or_default();
    let end = |code: i32, exited: bool, status: String| {
        let mut end = json!({"exitCode": code, "exited": exited, "status": status});
        if code != 0
            && let Some(end) = end.as_object_mut()
        {
            end.insert("error".to_owned(), status.into());
        }
        Ok(json!({"event": {"end": end}}))
    };
    match exit.outcome {
        Outcome::UserExit => end(
            exit.exit_code,
            true,
            format!("exit status {}", exit.exit_code),
        ),
        // There is no status then; -1 stands for that.
        Outcome::Signal => end(-1, false, format!("signal: {}", exit.signal.unwrap_or(0))),
        Outcome::Oom => end(-1, false, "killed for lack of memory".to_owned()),
        Outcome::TimedOut => Err(RpcError::new(
            "deadline_exceeded",
            "the command's time was over; everything that it had started was killed",
        )),
        Outcome::NotStarted => Err(RpcError::invalid(message)),
        Outcome::SandboxGone => Err(RpcError::new(
            "unavailable",
            format!("the sandbox is gone: {message}"),
        )),
        Outcome::InfraFailed => Err(RpcError::new("internal", message)),
    }
}

async fn simple(app: &App, envd: &Envd, method: &str, call: &Call) -> Result<Value, RpcError> {
    let socket = app.service.use_it(&envd.sandbox).await?;
    if method == "List" {
        return list(&socket).await;
    }
    let known = ["Update", "SendInput", "SendSignal", "CloseStdin"];
    if !known.contains(&method) {
        return Err(RpcError::unknown(method));
    }
    let asked: Selected = call.message()?;
    let exec = find(&socket, &asked.process).await?;
    let exec_id = exec.exec_id.clone();
    match method {
        "Update" => {
            let size = asked.pty.unwrap_or_default().size()?;
            ask(&socket, &Request::Resize { exec_id, size }).await
        }
        "SendSignal" => {
            let signal = signal(&asked.signal)?;
            let tree = signal == SIGKILL;
            let path = format!("/execs/{exec_id}/signal");
            let native = native("POST", &path, json!({"signal": signal, "tree": tree}));
            let request = Request::Signal {
                exec_id,
                signal,
                tree,
            };
            let id = envd.sandbox.info().id;
            noted(&app.service, &id, native, ask(&socket, &request)).await
        }
        "CloseStdin" if exec.pty => {
            let end = Bytes::from_static(&[END_OF_TRANSMISSION]);
            input(app, envd, (&socket, exec_id), end, false).await
        }
        "CloseStdin" => input(app, envd, (&socket, exec_id), Bytes::new(), true).await,
        _ => {
            let coded = asked.input.stdin.or(asked.input.pty).unwrap_or_default();
            let bytes = STANDARD
                .decode(coded)
                .map_err(|e| RpcError::invalid(format!("`input`: {e}")))?;
            input(app, envd, (&socket, exec_id), bytes.into(), false).await
        }
    }
}

/// Gives a process input, and writes that down.
async fn input(
    app: &App,
    envd: &Envd,
    (socket, exec_id): (&Door, String),
    bytes: Bytes,
    end: bool,
) -> Result<Value, RpcError> {
    let mark = if end { "?eof=true" } else { "" };
    let native = native(
        "POST",
        &format!("/execs/{exec_id}/stdin{mark}"),
        Value::Null,
    );
    let (id, sent) = (envd.sandbox.info().id, bytes.clone());
    let work = send(socket, exec_id, &bytes, end);
    noted_with(&app.service, &id, (native, sent), work).await
}

fn signal(asked: &Value) -> Result<i32, RpcError> {
    match (asked.as_str(), asked.as_i64()) {
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => Ok(15),
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => Ok(SIGKILL),
        _ => Err(RpcError::invalid(format!(
            "signal {asked}: SIGNAL_SIGTERM or SIGNAL_SIGKILL is expected"
        ))),
    }
}

async fn ask(socket: &Door, request: &Request) -> Result<Value, RpcError> {
    Link::connect(socket).await?.request(request).await?;
    Ok(json!({}))
}

async fn send(socket: &Door, exec_id: String, bytes: &[u8], end: bool) -> Result<Value, RpcError> {
    let mut link = Link::connect(socket).await?;
    link.request(&Request::Stdin { exec_id }).await?;
    for piece in bytes.chunks(PIECE_BYTES) {
        link.send(kind::DATA, piece).await?;
    }
    if end {
        link.send(kind::END, &[]).await?;
    }
    link.finish().await?;
    Ok(json!({}))
}

async fn list(socket: &Door) -> Result<Value, RpcError> {
    let processes: Vec<Value> = running(socket)
        .await?
        .iter()
        .map(|exec| {
            let (cmd, args) = exec
                .argv
                .split_first()
                .map_or(("", &[][..]), |(cmd, args)| (cmd.as_str(), args));
            let mut process = json!({"config": {"cmd": cmd, "args": args}, "pid": exec.pid});
            if let (Some(tag), Some(process)) = (tag(exec), process.as_object_mut()) {
                process.insert("tag".to_owned(), tag.into());
            }
            process
        })
        .collect();
    Ok(json!({"processes": processes}))
}
