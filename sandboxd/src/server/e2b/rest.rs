//! E2B's REST API of sandboxes. What cannot be done here is refused in words; nothing that is asked for is left out silently, but one:
//! access to the internet, which E2B's clients ask for unless told otherwise. A sandbox has none here, and says so when it is shown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SecondsFormat};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::super::{Asked, Project, find};
use super::access::{ENVD, TRAFFIC};
use super::noted::{native, noted};
use super::{App, ENVD_VERSION, Refused};
use crate::api::{
    CreateRequest, ForkRequest, Forked, Network, PackRequest, SandboxInfo, State as Life,
};
use crate::error::ApiError;
use crate::ids;
use crate::network::policy::{Ports, Protocol, Rule};
use crate::sandboxes::{Sandbox, now_ms};

/// Seconds that a sandbox lives if nothing is said (E2B's own clients say 300).
const TIMEOUT: f64 = 15.0;
/// Sandboxes of one page.
const PAGE_MAX: usize = 100;
/// How long processor time is watched to tell how much of it is used.
const METRICS_WINDOW: Duration = Duration::from_millis(100);

type Answer<T> = Result<T, Refused>;

/// Whose key it is; a wrong one is told in E2B's words.
#[derive(Debug)]
pub(in crate::server) struct Team(Project);

impl FromRequestParts<App> for Team {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Answer<Self> {
        Ok(Self(Project::from_request_parts(parts, app).await?))
    }
}

/// A body of JSON; what is wrong with it is told in E2B's words.
#[derive(Debug)]
pub(in crate::server) struct Body<T>(T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Refused;

    async fn from_request(request: Request, app: &App) -> Answer<Self> {
        let Asked(asked) = Asked::from_request(request, app).await?;
        Ok(Self(asked))
    }
}

fn bad(message: impl Into<String>) -> Refused {
    Refused::new(StatusCode::BAD_REQUEST, message)
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::server) struct Create {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(default)]
    timeout: Option<f64>,
    #[serde(default)]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(default)]
    env_vars: Option<BTreeMap<String, String>>,
    #[serde(default)]
    network: Option<Traffic>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// What may be said besides, and what it must be. `secure` and `allow_internet_access` may be anything: a token is always given
/// out, and there is no way to the internet.
const IGNORED: [&str; 3] = ["secure", "allow_internet_access", "autoPauseMemory"];

fn refuse_rest(rest: &Map<String, Value>) -> Answer<()> {
    for (name, value) in rest {
        let empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields
                .values()
                .all(|v| matches!(v, Value::Null | Value::Bool(false))),
            _ => false,
        };
        if !empty && !IGNORED.contains(&name.as_str()) {
            return Err(bad(format!("`{name}` of {value} is not available here")));
        }
    }
    Ok(())
}

/// Rules for what goes out and comes in.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::server) struct Traffic {
    #[serde(default)]
    allow_out: Option<Vec<String>>,
    /// Everything that is not allowed is denied anyhow.
    #[serde(default, rename = "denyOut")]
    _deny_out: Option<Vec<String>>,
    #[serde(default)]
    allow_public_traffic: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Traffic {
    fn rules(self, open: bool) -> Answer<Option<Network>> {
        refuse_rest(&self.rest)?;
        match self.allow_public_traffic {
            Some(true) if !open => Err(bad(
                "`allowPublicTraffic`: ports of sandboxes need the traffic token here",
            )),
            Some(false) if open => Err(bad(
                "`allowPublicTraffic: false` needs a daemon with API keys",
            )),
            _ => {
                let allow = self.allow_out.unwrap_or_default();
                let rules = allow.into_iter().flat_map(|to| any_port(&to)).collect();
                Ok(Some(Network { allow: rules }))
            }
        }
    }
}

/// Their rules have no ports: any. UDP by address alone, since QUIC hides names.
fn any_port(to: &str) -> Vec<Rule> {
    let rule = |protocol| Rule {
        to: to.to_owned(),
        port: Ports::Text("1-65535".to_owned()),
        protocol,
    };
    let named = to.bytes().any(|byte| byte.is_ascii_alphabetic());
    if named {
        vec![rule(Protocol::Tcp)]
    } else {
        vec![rule(Protocol::Tcp), rule(Protocol::Udp)]
    }
}

/// `base[+workspace][+toolkit…]`.
fn layers(app: &App, template: &str) -> Answer<(String, Option<String>, Vec<String>)> {
    let template = match (&app.e2b.template, template) {
        (Some(own), "base") => own,
        (None, "base") => {
            return Err(bad(
                "the template `base` stands for nothing here: name layers, as in `base/debian:12+workspace/repo:1+toolkit/uv:1`, or start sandboxd with `--e2b-template`",
            ));
        }
        (_, template) => template,
    };
    let mut names = template.split('+').map(str::trim);
    let base = names.next().unwrap_or_default();
    let is_digest = base.len() == 64 && base.bytes().all(|b| b.is_ascii_hexdigit());
    let base = if base.contains('/') || is_digest {
        base.to_owned()
    } else {
        format!("base/{base}")
    };
    let (mut workspace, mut toolkits) = (None, Vec::new());
    for name in names {
        if name.is_empty() {
            return Err(bad(format!(
                "template `{template}`: a layer without a name"
            )));
        }
        // Order counts: what lies above a toolkit is one more of those.
        if name.starts_with("workspace/") && workspace.is_none() && toolkits.is_empty() {
            workspace = Some(name.to_owned());
        } else {
            toolkits.push(name.to_owned());
        }
    }
    Ok((base, workspace, toolkits))
}

/// What a client needs to go on with a sandbox.
fn handed(app: &App, info: &SandboxInfo) -> Value {
    let token = |purpose| (!app.keys.are_open()).then(|| app.e2b.secret.token(purpose, &info.id));
    json!({
        "sandboxID": info.id, "templateID": info.refs.join("+"), "clientID": "dsec",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": app.e2b.secret.token(ENVD, &info.id),
        "trafficAccessToken": token(TRAFFIC),
        "domain": app.e2b.domain,
    })
}

fn time(ms: u64) -> String {
    let time = i64::try_from(ms)
        .ok()
        .and_then(DateTime::from_timestamp_millis);
    time.unwrap_or_default()
        .to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// A sandbox as lists show it.
fn shown(sandbox: &Sandbox) -> Value {
    let record = sandbox.record();
    let info = record.info;
    let state = if info.state == Life::Paused {
        "paused"
    } else {
        "running"
    };
    // There is always an end in E2B's world: one without is as far as its dates reach.
    let end = info
        .ends_ms
        .map_or_else(|| "9999-12-31T23:59:59.000Z".to_owned(), time);
    json!({
        "sandboxID": info.id, "templateID": info.refs.join("+"), "clientID": "dsec",
        "envdVersion": ENVD_VERSION, "state": state, "metadata": info.metadata,
        "startedAt": time(info.created_ms), "endAt": end,
        "cpuCount": cpu_count(record.limits.cpus),
        "memoryMB": record.limits.memory_bytes >> 20,
        "diskSizeMB": 0,
    })
}

/// Whole processors, at least one.
fn cpu_count(cpus: f64) -> u64 {
    (1..1024_u32)
        .find(|n| f64::from(*n) >= cpus)
        .unwrap_or(1024)
        .into()
}

/// `POST /sandboxes`.
pub(in crate::server) async fn create(
    State(app): State<App>,
    team: Team,
    Body(asked): Body<Create>,
) -> Answer<(StatusCode, Json<Value>)> {
    refuse_rest(&asked.rest)?;
    let (base, workspace, toolkits) = layers(&app, &asked.template_id)?;
    let network = asked
        .network
        .map(|n| n.rules(app.keys.are_open()))
        .transpose()?
        .flatten();
    let request = CreateRequest {
        timeout: Some(asked.timeout.unwrap_or(TIMEOUT)),
        workspace,
        toolkits,
        network,
        envs: asked.env_vars.unwrap_or_default(),
        metadata: asked.metadata.unwrap_or_default(),
        ..CreateRequest::of(base)
    };
    let info = app.service.create(&team.0.0, request).await?;
    Ok((StatusCode::CREATED, Json(handed(&app, &info))))
}

fn mine(app: &App, project: &Project, id: &str) -> Answer<Arc<Sandbox>> {
    let sandbox = find(app, project, id)?;
    let info = sandbox.info();
    if info.state == Life::Gone {
        let reason = info.reason.unwrap_or_default();
        return Err(Refused::new(
            StatusCode::NOT_FOUND,
            format!("sandbox `{id}` is gone: {reason}"),
        ));
    }
    Ok(sandbox)
}

/// `GET /v2/sandboxes`.
pub(in crate::server) async fn list(
    State(app): State<App>,
    team: Team,
    Query(query): Query<Vec<(String, String)>>,
) -> Answer<Response> {
    let value = |name: &str| {
        query
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    };
    let states: Vec<&str> = query
        .iter()
        .filter(|(name, _)| name == "state")
        .flat_map(|(_, value)| value.split(','))
        .collect();
    let wanted = value("metadata")
        .map(metadata_query)
        .transpose()?
        .unwrap_or_default();
    let after = value("startedAfter")
        .map(|text| {
            DateTime::parse_from_rfc3339(text).map_err(|e| bad(format!("`startedAfter`: {e}")))
        })
        .transpose()?;
    let limit = match value("limit").map(str::parse::<usize>) {
        None => PAGE_MAX,
        Some(Ok(limit)) if (1..=PAGE_MAX).contains(&limit) => limit,
        Some(_) => return Err(bad(format!("`limit` is 1 to {PAGE_MAX}"))),
    };
    let mut infos = app.service.list(&team.0.0);
    infos.retain(|info| {
        let state = match info.state {
            Life::Running => "running",
            Life::Paused => "paused",
            Life::Creating | Life::Gone => return false,
        };
        (states.is_empty() || states.contains(&state))
            && wanted
                .iter()
                .all(|(name, value)| info.metadata.get(name) == Some(value))
            && value("template").is_none_or(|template| info.refs.join("+") == template)
            && after.is_none_or(|after| {
                i64::try_from(info.created_ms).is_ok_and(|ms| ms > after.timestamp_millis())
            })
    });
    if value("order") != Some("asc") {
        infos.reverse();
    }
    // A token is the last sandbox of the page before; if that is gone meanwhile, its time still says where to go on.
    if let Some(token) = value("nextToken") {
        let last = token
            .split_once('-')
            .and_then(|(ms, id)| Some((ms.parse::<u64>().ok()?, id.to_owned())));
        let last = last.ok_or_else(|| bad("`nextToken` is none of ours"))?;
        let ascending = value("order") == Some("asc");
        infos.retain(|info| {
            let place = (info.created_ms, info.id.clone());
            if ascending {
                place > last
            } else {
                place < last
            }
        });
    }
    let more = infos.len() > limit;
    infos.truncate(limit);
    let next = infos
        .last()
        .filter(|_| more)
        .map(|info| format!("{}-{}", info.created_ms, info.id));
    let page: Vec<Value> = infos
        .iter()
        .filter_map(|info| find(&app, &team.0, &info.id).ok())
        .map(|sandbox| shown(&sandbox))
        .collect();
    let mut response = Json(page).into_response();
    if let Some(next) = next.and_then(|next| next.parse().ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    Ok(response)
}

/// `name=value&…`, coded twice: as a query, and within it.
fn metadata_query(text: &str) -> Answer<Vec<(String, String)>> {
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| bad("`metadata` is `name=value&…`"))?;
            Ok((decoded(&decoded(name)?)?, decoded(&decoded(value)?)?))
        })
        .collect()
}

fn decoded(text: &str) -> Answer<String> {
    let wrong = || bad("`metadata`: bad percent coding");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [
                    rest.next().ok_or_else(wrong)?,
                    rest.next().ok_or_else(wrong)?,
                ];
                let digits = std::str::from_utf8(&digits).map_err(|_split| wrong())?;
                u8::from_str_radix(digits, 16).map_err(|_bad| wrong())?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_bad| wrong())
}

/// `GET /sandboxes/{id}`.
pub(in crate::server) async fn show(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
) -> Answer<Json<Value>> {
    let sandbox = mine(&app, &team.0, &id)?;
    let mut told = shown(&sandbox);
    let more = json!({
        "envdAccessToken": app.e2b.secret.token(ENVD, &id), "domain": app.e2b.domain,
        "allowInternetAccess": false,
        "lifecycle": {"autoResume": false, "onTimeout": "kill"},
    });
    if let (Some(told), Value::Object(more)) = (told.as_object_mut(), more) {
        told.extend(more);
    }
    Ok(Json(told))
}

/// `DELETE /sandboxes/{id}`.
pub(in crate::server) async fn kill(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
) -> Answer<StatusCode> {
    let sandbox = mine(&app, &team.0, &id)?;
    let kill = async { Ok::<_, Refused>(app.service.kill(sandbox).await?) };
    noted(&app.service, &id, native("DELETE", "", Value::Null), kill).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
pub(in crate::server) struct Pause {
    #[serde(default)]
    memory: Option<bool>,
}

/// `POST /sandboxes/{id}/pause`.
pub(in crate::server) async fn pause(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Pause>,
) -> Answer<StatusCode> {
    let sandbox = mine(&app, &team.0, &id)?;
    if asked.memory == Some(false) {
        return Err(bad("pausing without memory is not available here"));
    }
    if sandbox.info().state == Life::Paused {
        return Err(Refused::new(
            StatusCode::CONFLICT,
            format!("sandbox `{id}` is paused already"),
        ));
    }
    let pause = async { Ok::<_, Refused>(app.service.pause(&sandbox).await?) };
    let native = native("POST", "/pause", Value::Null);
    noted(&app.service, &id, native, pause).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
pub(in crate::server) struct Lifetime {
    #[serde(default)]
    timeout: Option<f64>,
}

/// `POST /sandboxes/{id}/resume`: older clients.
pub(in crate::server) async fn resume(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Lifetime>,
) -> Answer<(StatusCode, Json<Value>)> {
    let sandbox = mine(&app, &team.0, &id)?;
    if sandbox.info().state != Life::Paused {
        return Err(Refused::new(
            StatusCode::CONFLICT,
            format!("sandbox `{id}` runs already"),
        ));
    }
    wake(&app, &sandbox).await?;
    let timeout = asked.timeout.unwrap_or(TIMEOUT);
    let info = live(&app, &sandbox, timeout).await?;
    Ok((StatusCode::CREATED, Json(handed(&app, &info))))
}

/// `POST /sandboxes/{id}/connect`: lets it go on, and live at least so long.
pub(in crate::server) async fn connect(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Lifetime>,
) -> Answer<(StatusCode, Json<Value>)> {
    let sandbox = mine(&app, &team.0, &id)?;
    let timeout = asked.timeout.ok_or_else(|| bad("`timeout` is expected"))?;
    let paused = sandbox.info().state == Life::Paused;
    if paused {
        wake(&app, &sandbox).await?;
    }
    extend(&app, &sandbox, timeout, paused).await?;
    let status = if paused {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(handed(&app, &sandbox.info()))))
}

async fn wake(app: &App, sandbox: &Arc<Sandbox>) -> Answer<()> {
    let resume = async { Ok::<_, Refused>(app.service.resume(sandbox).await.map(drop)?) };
    let native = native("POST", "/resume", Value::Null);
    noted(&app.service, &sandbox.info().id, native, resume).await
}

/// Moves a sandbox's end further away, or sets it.
async fn extend(app: &App, sandbox: &Arc<Sandbox>, seconds: f64, set: bool) -> Answer<()> {
    let ends = sandbox.info().ends_ms;
    let left_ms = ends.map(|end| end.saturating_sub(now_ms()));
    let longer = left_ms.is_some_and(|left| {
        Duration::try_from_secs_f64(seconds).is_ok_and(|new| new > Duration::from_millis(left))
    });
    if set || longer || !seconds.is_finite() || seconds <= 0.0 {
        live(app, sandbox, seconds).await?;
    }
    Ok(())
}

/// Lets a sandbox live so long from now on.
async fn live(app: &App, sandbox: &Arc<Sandbox>, seconds: f64) -> Answer<SandboxInfo> {
    let set = async { Ok::<_, Refused>(app.service.set_timeout(sandbox, Some(seconds)).await?) };
    let native = native("POST", "/timeout", json!({"timeout": seconds}));
    noted(&app.service, &sandbox.info().id, native, set).await
}

/// `POST /sandboxes/{id}/timeout`.
pub(in crate::server) async fn timeout(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Lifetime>,
) -> Answer<StatusCode> {
    let sandbox = mine(&app, &team.0, &id)?;
    let timeout = asked.timeout.ok_or_else(|| bad("`timeout` is expected"))?;
    live(&app, &sandbox, timeout).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
pub(in crate::server) struct Refresh {
    #[serde(default)]
    duration: Option<f64>,
}

/// `POST /sandboxes/{id}/refreshes`.
pub(in crate::server) async fn refresh(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Refresh>,
) -> Answer<StatusCode> {
    let sandbox = mine(&app, &team.0, &id)?;
    extend(&app, &sandbox, asked.duration.unwrap_or(TIMEOUT), false).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PUT /sandboxes/{id}/network`.
pub(in crate::server) async fn network(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Traffic>,
) -> Answer<StatusCode> {
    mine(&app, &team.0, &id)?;
    let rules = asked.rules(app.keys.are_open())?;
    if rules.is_some_and(|rules| !rules.allow.is_empty()) {
        return Err(bad("rules of a living sandbox cannot be changed here"));
    }
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /sandboxes/{id}/metrics`: as they are now; what was is not kept.
pub(in crate::server) async fn metrics(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
) -> Answer<Json<Value>> {
    let sandbox = mine(&app, &team.0, &id)?;
    let before = app.service.usage(&sandbox)?;
    let began = tokio::time::Instant::now();
    tokio::time::sleep(METRICS_WINDOW).await;
    let usage = app.service.usage(&sandbox)?;
    let used = Duration::from_micros(usage.cpu_us.saturating_sub(before.cpu_us));
    let limits = sandbox.record().limits;
    let percent =
        used.as_secs_f64() / began.elapsed().as_secs_f64() * 100.0 / limits.cpus.max(0.01);
    let now = now_ms();
    Ok(Json(json!([{
        "timestamp": time(now), "timestampUnix": now / 1000,
        "cpuCount": cpu_count(limits.cpus), "cpuUsedPct": percent,
        "memUsed": usage.memory_bytes, "memTotal": limits.memory_bytes, "memCache": 0,
        "diskUsed": 0, "diskTotal": 0,
    }])))
}

#[derive(Debug, Deserialize)]
pub(in crate::server) struct Fork {
    #[serde(default)]
    timeout: Option<f64>,
    #[serde(default)]
    count: Option<u32>,
}

/// `POST /sandboxes/{id}/fork`: children have the files, not the processes.
pub(in crate::server) async fn fork(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Fork>,
) -> Answer<(StatusCode, Json<Value>)> {
    let sandbox = mine(&app, &team.0, &id)?;
    let request = ForkRequest {
        count: asked.count.unwrap_or(1),
        from: None,
        timeout: Some(asked.timeout.unwrap_or(TIMEOUT)),
    };
    let native = native("POST", "/fork", json!(request));
    let fork = async { Ok::<_, Refused>(app.service.fork(sandbox, request).await?) };
    let made = noted(&app.service, &id, native, fork).await?;
    let told: Vec<Value> = made
        .children
        .into_iter()
        .map(|child| match child {
            Forked::Child(info) => json!({"sandbox": handed(&app, &info)}),
            Forked::Failed(error) => error_of(error),
        })
        .collect();
    Ok((StatusCode::CREATED, Json(told.into())))
}

fn error_of(error: ApiError) -> Value {
    let refused = Refused::from(error);
    json!({"error": {"code": refused.status.as_u16(), "message": refused.message}})
}

#[derive(Debug, Deserialize)]
pub(in crate::server) struct Snapshot {
    #[serde(default)]
    name: Option<String>,
}

/// `POST /sandboxes/{id}/snapshots`: its files as a layer; the id is a template.
pub(in crate::server) async fn snapshot(
    State(app): State<App>,
    team: Team,
    Path(id): Path<String>,
    Body(asked): Body<Snapshot>,
) -> Answer<(StatusCode, Json<Value>)> {
    let sandbox = mine(&app, &team.0, &id)?;
    let name = asked.name.unwrap_or_else(|| id.clone());
    let packed = PackRequest {
        // A version of its own: layers are not replaced.
        name: format!("toolkit/snapshot-{name}:{}", ids::random()),
        scrub: Vec::new(),
    };
    let below = sandbox.info().refs.join("+");
    let native = native("POST", "/pack_diff", json!(packed));
    let pack = async { Ok::<_, Refused>(app.service.pack_diff(sandbox, packed).await?) };
    let layer = noted(&app.service, &id, native, pack).await?;
    let snapshot = format!("{below}+{}", layer.name);
    Ok((
        StatusCode::CREATED,
        Json(json!({"snapshotID": snapshot, "names": [layer.name]})),
    ))
}

/// `GET /snapshots`.
pub(in crate::server) async fn snapshots(_team: Team) -> Refused {
    Refused::new(
        StatusCode::NOT_IMPLEMENTED,
        "snapshots are layers here: `dsec layers` lists them",
    )
}

/// `DELETE /templates/{id}`.
pub(in crate::server) async fn forget(_team: Team, Path(_id): Path<String>) -> Refused {
    Refused::new(
        StatusCode::NOT_IMPLEMENTED,
        "snapshots are layers here: `dsec rm` removes them",
    )
}
