//! `filesystem.Filesystem` of envd: work on files that is not their bytes, and watching folders.

use std::fmt::Write as _;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::Response;
use chrono::{DateTime, SecondsFormat};
use futures_util::{Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};

use super::App;
use super::access::Envd;
use super::connect::{self, Call, RpcError};
use super::noted::{native, noted, of_file};
use super::watchers;
use crate::container::files::{EntryKind, FileEntry, FileReply, FileRequest};
use crate::container::link::{Event, Link};
use crate::container::protocol::{Answer, Request};
use crate::container::watch::{Change, WatchEvent};

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Asked {
    path: String,
    depth: u32,
    source: String,
    destination: String,
    recursive: bool,
    include_entry: bool,
    allow_network_mounts: bool,
    watcher_id: String,
}

/// `POST /filesystem.Filesystem/{method}`.
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
        ("WatchDir", true) => match watch(&app, &envd, &call).await {
            Ok(link) => connect::stream(events(link, &call)),
            Err(error) => connect::failed_stream(error),
        },
        (_, true) => connect::failed_stream(RpcError::unknown(&method)),
        (method, false) => connect::unary(simple(&app, &envd, method, &call).await),
    }
}

/// Asks the agent for work on files, as the request's user.
pub(super) async fn ask(
    app: &App,
    envd: &Envd,
    request: FileRequest,
) -> Result<FileReply, RpcError> {
    let mut link = Link::connect(&app.service.use_it(&envd.sandbox).await?).await?;
    let request = Request::Files {
        request,
        user: Some(envd.user()),
    };
    match link.request(&request).await? {
        Answer::Files { reply } => Ok(reply),
        other => Err(RpcError::unexpected(&other)),
    }
}

/// An entry.
pub(super) async fn stat(app: &App, envd: &Envd, path: String) -> Result<FileEntry, RpcError> {
    match ask(app, envd, FileRequest::Stat { path }).await? {
        FileReply::Entries(entries) => entries
            .into_iter()
            .next()
            .ok_or_else(|| RpcError::new("internal", "no entry")),
        other => Err(RpcError::unexpected(&other)),
    }
}

async fn simple(app: &App, envd: &Envd, method: &str, call: &Call) -> Result<Value, RpcError> {
    let asked: Asked = call.message()?;
    let named = |path: &String| {
        if path.is_empty() {
            Err(RpcError::invalid("a path is expected"))
        } else {
            Ok(path.clone())
        }
    };
    match method {
        "Stat" => Ok(json!({"entry": entry(&stat(app, envd, named(&asked.path)?).await?)})),
        "ListDir" => {
            let request = FileRequest::List {
                path: named(&asked.path)?,
                depth: asked.depth.max(1),
            };
            match ask(app, envd, request).await? {
                FileReply::Entries(entries) => {
                    let entries: Vec<Value> = entries.iter().map(entry).collect();
                    Ok(json!({"entries": entries}))
                }
                other => Err(RpcError::unexpected(&other)),
            }
        }
        "MakeDir" => {
            let path = named(&asked.path)?;
            let native = of_file("POST", "/files/mkdir", &path, &envd.user());
            change(app, envd, native, make_dir(app, envd, path)).await
        }
        "Move" => {
            let (from, to) = (named(&asked.source)?, named(&asked.destination)?);
            let body = json!({"from": from, "to": to, "user": envd.user()});
            let rename = FileRequest::Rename {
                from,
                to: to.clone(),
            };
            let native = native("POST", "/files/rename", body);
            change(app, envd, native, ask(app, envd, rename)).await?;
            Ok(json!({"entry": entry(&stat(app, envd, to).await?)}))
        }
        "Remove" => {
            // One that is not there is removed already.
            let path = named(&asked.path)?;
            let native = of_file("DELETE", "/files", &path, &envd.user());
            let remove = FileRequest::Remove { path };
            match change(app, envd, native, ask(app, envd, remove)).await {
                Err(error) if !error.is_not_found() => Err(error),
                _ => Ok(json!({})),
            }
        }
        _ => watcher(app, envd, method, (call, &asked.watcher_id)).await,
    }
}

/// Carries a change out, and writes it down as the native request that does the same.
async fn change<T>(
    app: &App,
    envd: &Envd,
    native: crate::trajectory::event::Asked,
    work: impl Future<Output = Result<T, RpcError>>,
) -> Result<T, RpcError> {
    noted(&app.service, &envd.sandbox.info().id, native, work).await
}

async fn make_dir(app: &App, envd: &Envd, path: String) -> Result<Value, RpcError> {
    match stat(app, envd, path.clone()).await {
        Ok(there) if there.kind == EntryKind::Directory => {
            let message = format!("`{path}` is there already");
            return Err(RpcError::new("already_exists", message));
        }
        Ok(_) => {
            let message = format!("`{path}` is there and no folder");
            return Err(RpcError::invalid(message));
        }
        // What else may be wrong shows when it is made.
        Err(_) => {}
    }
    let request = FileRequest::MakeDir {
        path: path.clone(),
        mode: None,
    };
    ask(app, envd, request).await?;
    Ok(json!({"entry": entry(&stat(app, envd, path).await?)}))
}

/// Watchers that are asked now and then.
async fn watcher(
    app: &App,
    envd: &Envd,
    method: &str,
    (call, watcher): (&Call, &str),
) -> Result<Value, RpcError> {
    let id = envd.sandbox.info().id;
    match method {
        "CreateWatcher" => {
            let link = watch(app, envd, call).await?;
            Ok(json!({"watcherId": app.e2b.watchers.add(&id, link)?}))
        }
        "GetWatcherEvents" => {
            let events = app.e2b.watchers.take(&id, watcher)?;
            let events: Vec<Value> = events.iter().map(watchers::event).collect();
            Ok(json!({"events": events}))
        }
        "RemoveWatcher" => {
            app.e2b.watchers.remove(&id, watcher)?;
            Ok(json!({}))
        }
        _ => Err(RpcError::unknown(method)),
    }
}

async fn watch(app: &App, envd: &Envd, call: &Call) -> Result<Link, RpcError> {
    let asked: Asked = call.message()?;
    if asked.include_entry || asked.allow_network_mounts {
        return Err(RpcError::new(
            "unimplemented",
            "events have no entries here, and there are no network mounts",
        ));
    }
    let mut link = Link::connect(&app.service.use_it(&envd.sandbox).await?).await?;
    let request = FileRequest::Watch {
        path: asked.path,
        recursive: asked.recursive,
    };
    let request = Request::Files {
        request,
        user: Some(envd.user()),
    };
    match link.request(&request).await? {
        Answer::Ok => Ok(link),
        other => Err(RpcError::unexpected(&other)),
    }
}

fn events(link: Link, call: &Call) -> impl Stream<Item = Result<Value, RpcError>> + Send + 'static {
    let (keepalive, until) = (
        call.keepalive,
        call.timeout.map(|t| tokio::time::Instant::now() + t),
    );
    let rest = futures_util::stream::unfold(Some(link), move |link| async move {
        let mut link = link?;
        let next = tokio::time::Instant::now() + keepalive;
        let wake = until.map_or(next, |until| until.min(next));
        match tokio::time::timeout_at(wake, link.next()).await {
            Err(_) if until.is_some_and(|until| until <= tokio::time::Instant::now()) => Some((
                Err(RpcError::new(
                    "deadline_exceeded",
                    "the time for watching is over",
                )),
                None,
            )),
            Err(_) => Some((Ok(json!({"keepalive": {}})), Some(link))),
            Ok(Ok(Event::Data(bytes))) => match serde_json::from_slice::<WatchEvent>(&bytes) {
                Ok(told) if told.change == Change::Overflow => {
                    Some((Err(watchers::overflow()), None))
                }
                Ok(told) => Some((
                    Ok(json!({"filesystem": watchers::event(&told)})),
                    Some(link),
                )),
                Err(error) => Some((Err(RpcError::new("internal", error.to_string())), None)),
            },
            Ok(Ok(other)) => Some((Err(RpcError::unexpected(&other)), None)),
            Ok(Err(error)) => Some((Err(error.into()), None)),
        }
    });
    futures_util::stream::once(async { Ok(json!({"start": {}})) }).chain(rest)
}

/// As `ls -l` shows it.
fn permissions(entry: &FileEntry) -> String {
    let kind = match entry.kind {
        EntryKind::Directory => 'd',
        EntryKind::Symlink => 'L',
        EntryKind::File | EntryKind::Other => '-',
    };
    let mut text = String::from(kind);
    for (shift, name) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        let set = entry.mode >> shift & 1 == 1;
        write!(text, "{}", if set { name } else { '-' }).expect("a string takes everything");
    }
    text
}

/// An entry as envd tells it.
pub(super) fn entry(entry: &FileEntry) -> Value {
    let kind = match entry.kind {
        EntryKind::File => "FILE_TYPE_FILE",
        EntryKind::Directory => "FILE_TYPE_DIRECTORY",
        EntryKind::Symlink => "FILE_TYPE_SYMLINK",
        EntryKind::Other => "FILE_TYPE_UNSPECIFIED",
    };
    let time = DateTime::from_timestamp(entry.modified, 0).unwrap_or_default();
    let mut told = json!({
        "name": entry.name, "type": kind, "path": entry.path,
        // Numbers of 64 bits are texts in this coding.
        "size": entry.size.to_string(),
        "mode": entry.mode, "permissions": permissions(entry),
        "owner": entry.owner, "group": entry.group,
        "modifiedTime": time.to_rfc3339_opts(SecondsFormat::Secs, true),
    });
    if let (Some(target), Some(told)) = (&entry.symlink_target, told.as_object_mut()) {
        told.insert("symlinkTarget".to_owned(), target.as_str().into());
    }
    told
}
