//! `dsec trajectory`: what was asked of a sandbox and what it did; and the same once more, elsewhere.

mod line;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use http_body_util::BodyExt as _;
use hyper::Method;
use serde_json::{Value, json};

use super::Failure;
use super::sandbox::http::{Client, Pieces, quoted};
use super::sandbox::{path_of, text, wait};
use crate::output;
use line::Life;

/// `dsec trajectory`.
#[derive(Debug, Subcommand)]
pub(crate) enum TrajectoryCommand {
    /// Print a sandbox's requests and results in their order.
    Show {
        /// The sandbox; one that has ended, too.
        id: String,
        /// Print JSON, one event a line.
        #[arg(long)]
        json: bool,
    },
    /// Send a sandbox's requests to a new one, and compare what both have changed; exit status 1 if they differ.
    Replay(ReplayArgs),
}

/// `dsec trajectory replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The sandbox.
    id: String,
    /// The new sandbox's lowest layer.
    #[arg(long, value_name = "REF")]
    on: String,
    /// A workspace above it.
    #[arg(long, value_name = "REF")]
    workspace: Option<String>,
    /// A toolkit above that; can be given several times.
    #[arg(long, value_name = "REF")]
    toolkit: Vec<String>,
    /// Leave the new sandbox there, and print its id.
    #[arg(long)]
    keep: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// See the head of this file.
///
/// # Errors
/// What the daemon said, or why it was not reached.
pub(crate) fn run(command: &TrajectoryCommand) -> Result<ExitCode, Failure> {
    let client = Client::from_env();
    wait(async {
        match command {
            TrajectoryCommand::Show { id, json } => show(&client, id, *json).await,
            TrajectoryCommand::Replay(args) => replay(&client, args).await,
        }
    })
}

async fn events(client: &Client, id: &str) -> Result<Vec<Value>, Failure> {
    let (mut all, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let path = path_of(id, &format!("/trajectory?from={at}"));
        let mut page = client.json(Method::GET, &path, None).await?;
        from = page.get("next").and_then(Value::as_u64);
        let events = page.get_mut("events").and_then(Value::as_array_mut);
        all.append(events.ok_or("sandboxd sent no events")?);
    }
    Ok(all)
}

fn number(value: &Value, name: &str) -> u64 {
    value.get(name).and_then(Value::as_u64).unwrap_or(0)
}

fn path(request: &Value) -> &str {
    text(request, "path")
}

/// A request in a few words.
fn words(request: &Value) -> String {
    let body = request.get("body").unwrap_or(&Value::Null);
    let detail = match path(request) {
        "/execs" => match body.get("cmd").and_then(Value::as_str) {
            Some(cmd) => cmd.to_owned(),
            None => {
                let args = body.get("args").and_then(Value::as_array);
                let args = args.into_iter().flatten().filter_map(Value::as_str);
                args.collect::<Vec<_>>().join(" ")
            }
        },
        "" => text(body, "base").to_owned(),
        _ => String::new(),
    };
    let name = match (text(request, "method"), path(request)) {
        ("POST", "") => "create".to_owned(),
        ("FORK", "") => "made by fork".to_owned(),
        ("DELETE", "") => "kill".to_owned(),
        ("POST", "/execs") => "exec".to_owned(),
        (method, path) => format!("{method} {path}"),
    };
    let line: String = detail.chars().take(120).collect();
    format!("{name} {}", line.escape_debug())
        .trim_end()
        .to_owned()
}

async fn show(client: &Client, id: &str, json: bool) -> Result<ExitCode, Failure> {
    for event in events(client, id).await? {
        if json {
            output::line(&event.to_string());
            continue;
        }
        let seq = number(&event, "seq");
        let said = match text(&event, "what") {
            "request" => format!("request  {}  {}", text(&event, "request_id"), words(&event)),
            "result" => {
                let reply = event.get("reply").unwrap_or(&Value::Null);
                let how = match (text(reply, "outcome"), text(reply, "kind")) {
                    ("", "") => text(&event, "outcome").to_owned(),
                    ("", kind) => format!("{kind}: {}", text(reply, "message")),
                    (outcome, _) => {
                        let code = reply.get("exit_code").and_then(Value::as_i64);
                        format!("{outcome} {}", code.unwrap_or(0))
                    }
                };
                format!("result of {}  {how}", number(&event, "of"))
            }
            "ended" => format!("ended: {}", text(&event, "reason")),
            other => other.to_owned(),
        };
        output::line(&format!("{seq:>6}  {said}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// One replay.
struct Replay<'a> {
    client: &'a Client,
    from: String,
    to: String,
    /// Requests by number, with how the original ended.
    requests: BTreeMap<u64, (Value, Option<Value>)>,
    differences: Vec<String>,
}

async fn replay(client: &Client, args: &ReplayArgs) -> Result<ExitCode, Failure> {
    let line = line::of(client, &args.id).await?;
    let first = line.first().and_then(|life| life.events.first());
    let first = first.ok_or("this trajectory is empty")?;
    let mut body = first.get("body").cloned().unwrap_or_default();
    let fields = body.as_object_mut().ok_or("the create has no body")?;
    for name in ["request_id", "timeout", "idle_timeout", "metadata"] {
        fields.remove(name);
    }
    fields.insert("base".to_owned(), json!(args.on));
    fields.insert("workspace".to_owned(), json!(args.workspace));
    fields.insert("toolkits".to_owned(), json!(args.toolkit));
    let made = client
        .json(Method::POST, "/v1/sandboxes", Some(&body))
        .await?;
    let mut replay = Replay {
        client,
        from: args.id.clone(),
        to: text(&made, "id").to_owned(),
        requests: BTreeMap::new(),
        differences: Vec::new(),
    };
    let compared = replay.go(&line).await;
    if !args.keep {
        let path = path_of(&replay.to, "");
        client.json(Method::DELETE, &path, None).await?;
    }
    let equal = compared?;
    if args.json {
        output::json(&json!({
            "sandbox": args.keep.then_some(&replay.to), "equal": equal,
            "differences": replay.differences,
        }));
    } else {
        for difference in &replay.differences {
            output::note(difference);
        }
        if args.keep {
            output::line(&replay.to);
        }
        output::note(if equal { "equal" } else { "different" });
    }
    Ok(ExitCode::from(u8::from(!equal)))
}

impl Replay<'_> {
    /// Sends everything, from ancestor to child, and tells whether both have changed the same.
    async fn go(&mut self, line: &[Life]) -> Result<bool, Failure> {
        for (n, life) in line.iter().enumerate() {
            if n > 0 {
                self.become_child().await?;
            }
            self.from.clone_from(&life.sandbox);
            self.live(&life.events).await?;
        }
        let changes = async |id: &str| {
            let path = path_of(id, "/changes");
            self.client.json(Method::GET, &path, None).await
        };
        let (ours, theirs) = (changes(&self.to).await?, changes(&self.from).await?);
        if ours != theirs {
            let told = format!("changes: {theirs} there, {ours} here");
            self.differences.push(told);
        }
        Ok(self.differences.is_empty())
    }

    /// Goes on in a child: it has the files, not the processes.
    async fn become_child(&mut self) -> Result<(), Failure> {
        let forked = self
            .client
            .json(
                Method::POST,
                &path_of(&self.to, "/fork"),
                Some(&json!({"count": 1})),
            )
            .await?;
        let child = forked.pointer("/children/0").unwrap_or(&Value::Null);
        let id = text(child, "id").to_owned();
        if id.is_empty() {
            return Err(text(child, "message").into());
        }
        let parent = std::mem::replace(&mut self.to, id);
        self.requests.clear();
        let path = path_of(&parent, "");
        self.client.json(Method::DELETE, &path, None).await?;
        Ok(())
    }

    /// Sends the requests of one sandbox.
    async fn live(&mut self, events: &[Value]) -> Result<(), Failure> {
        let result = |of: u64| {
            let found = events
                .iter()
                .find(|e| text(e, "what") == "result" && number(e, "of") == of);
            found.cloned()
        };
        for event in events.iter().skip(1) {
            match text(event, "what") {
                "request" => self.send(event, result(number(event, "seq"))).await?,
                "result" => self.wait_for(event).await?,
                _ => {}
            }
        }
        Ok(())
    }

    async fn send(&mut self, request: &Value, result: Option<Value>) -> Result<(), Failure> {
        let (method, at) = (text(request, "method"), path(request));
        let changes_no_file = at.is_empty()
            || [
                "/pack_diff",
                "/fork",
                "/pause",
                "/resume",
                "/timeout",
                "/steps",
            ]
            .iter()
            .any(|skipped| at.starts_with(skipped));
        let outcome = result.as_ref().map(|r| text(r, "outcome").to_owned());
        match outcome.as_deref() {
            _ if changes_no_file => return Ok(()),
            Some("not_done") => return Ok(()),
            Some("unknown") => {
                let id = text(request, "request_id");
                return Err(
                    format!("what became of request `{id}` is not known: no replay").into(),
                );
            }
            _ => {}
        }
        let seq = number(request, "seq");
        let to = path_of(&self.to, at);
        let sent = if at == "/execs" {
            let mut body = request.get("body").cloned().unwrap_or_default();
            let fields = body.as_object_mut().ok_or("an exec has no body")?;
            fields.insert("request_id".to_owned(), json!(text(request, "request_id")));
            fields.insert("background".to_owned(), json!(true));
            let sent = self.client.json(Method::POST, &to, Some(&body)).await;
            sent.map(drop)
        } else if method == "PUT" || at.contains("/stdin") {
            let bytes = self.bytes(seq, result.as_ref()).await?;
            let method = if method == "PUT" {
                Method::PUT
            } else {
                Method::POST
            };
            let pieces = Pieces::read(bytes);
            self.client.upload(method, &to, pieces).await
        } else {
            let method: Method = method.parse()?;
            let body = request.get("body").filter(|body| !body.is_null());
            self.client.json(method, &to, body).await.map(drop)
        };
        let well = result.as_ref().is_none_or(|r| number(r, "status") < 300);
        if sent.is_ok() != well {
            let how = sent.map_or_else(|e| format!("failed: {e}"), |()| "did well".to_owned());
            self.differences
                .push(format!("{seq}: {} {how}", words(request)));
        }
        self.requests.insert(seq, (request.clone(), result));
        Ok(())
    }

    /// The bytes that a request came with.
    async fn bytes(&self, seq: u64, result: Option<&Value>) -> Result<File, Failure> {
        let upload = result.and_then(|r| r.get("upload"));
        let kept = upload.and_then(|u| u.get("kept")).and_then(Value::as_bool);
        if kept != Some(true) {
            let why = "its bytes are not kept (8 GiB of a sandbox are)";
            return Err(format!("request {seq} cannot be sent again: {why}").into());
        }
        let path = path_of(&self.from, &format!("/trajectory/{seq}/body"));
        let response = self.client.stream(Method::GET, &path, None).await?;
        let (mut file, mut body) = (tempfile::tempfile()?, response.into_body());
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame?.into_data() {
                file.write_all(&data)?;
            }
        }
        file.seek(SeekFrom::Start(0))?;
        Ok(file)
    }

    /// Waits for an exec's end where the original had ended, and compares.
    async fn wait_for(&mut self, result: &Value) -> Result<(), Failure> {
        let of = number(result, "of");
        let Some((request, _)) = self.requests.get(&of) else {
            return Ok(());
        };
        if path(request) != "/execs" || number(result, "status") >= 300 {
            return Ok(());
        }
        let exec = quoted(text(request, "request_id"));
        let path = path_of(&self.to, &format!("/execs/{exec}"));
        let ours = self.client.json(Method::GET, &path, None).await?;
        let theirs = result.get("reply").cloned().unwrap_or_default();
        for name in ["outcome", "exit_code", "stdout", "stderr"] {
            if ours.get(name) != theirs.get(name) {
                let what = format!("{of}: {}: `{name}` differs", words(request));
                self.differences.push(what);
            }
        }
        Ok(())
    }
}
