//! What a request for a sandbox means: the record of one that is not made yet. Pure, but for the time and the name.

use super::{Service, ms, now_ms};
use crate::api::{CreateRequest, SandboxInfo, State};
use crate::container::cgroup::Limits;
use crate::disk::{self, Disk, Keeper};
use crate::error::{ApiError, ErrorKind};
use crate::ids;
use crate::network::NetworkError;
use crate::network::policy::Policy;
use crate::store::Record;
use crate::trajectory::event::{Asked, What};

const MEMORY_MB: u64 = 4096;
const CPUS: f64 = 4.0;
const PIDS: u32 = 4096;

impl Service {
    /// Whether a sandbox was made by just this request.
    pub(super) fn was_asked(&self, id: &str, now: &Asked) -> Result<bool, ApiError> {
        let (events, _) = self.trajectory.events(id, 0, 1)?;
        let first = events.into_iter().next().map(|event| event.what);
        Ok(matches!(first, Some(What::Request { asked, .. }) if asked == *now))
    }
}

/// The record of a sandbox that is asked for.
pub(super) fn plan(
    project: &str,
    request: &CreateRequest,
    (default_disk_mb, keeper): (Option<u64>, Keeper),
) -> Result<Record, ApiError> {
    let invalid = |message: String| Err(ApiError::new(ErrorKind::Invalid, message));
    let disk_mb = request.disk_mb.or(default_disk_mb);
    if disk_mb.is_some_and(|mib| !(disk::MIB_MIN..=disk::MIB_MAX).contains(&mib)) {
        let (min, max) = (disk::MIB_MIN, disk::MIB_MAX);
        return invalid(format!(
            "`disk_mb` of {}: {min} to {max} are expected",
            disk_mb.unwrap_or(0)
        ));
    }
    let network = request.network.clone().unwrap_or_default().allow;
    Policy::new(&network).map_err(NetworkError::from)?;
    let cpus = request.cpus.unwrap_or(CPUS);
    if !(0.01..=1024.0).contains(&cpus) {
        return invalid(format!("`cpus` of {cpus}: 0.01 to 1024 are expected"));
    }
    let memory_mb = request.memory_mb.unwrap_or(MEMORY_MB);
    if !(4..=16 << 20).contains(&memory_mb) {
        return invalid(format!(
            "`memory_mb` of {memory_mb}: 4 to 16777216 are expected"
        ));
    }
    let refs = std::iter::once(&request.base)
        .chain(&request.workspace)
        .chain(&request.toolkits);
    Ok(Record {
        info: SandboxInfo {
            id: format!("sb-{}", ids::random()),
            state: State::Creating,
            reason: None,
            backend: request.backend.clone(),
            refs: refs.cloned().collect(),
            layers: Vec::new(),
            created_ms: now_ms(),
            ends_ms: None,
            metadata: request.metadata.clone(),
            request_id: request.request_id.clone(),
            parent: None,
            disk: disk_mb.map(|mib| Disk::of(mib, keeper)),
        },
        project: project.to_owned(),
        limits: Limits {
            memory_bytes: memory_mb << 20,
            cpus,
            pids: request.pids.unwrap_or(PIDS),
        },
        envs: request.envs.clone(),
        user: request.user.clone().unwrap_or_default(),
        cwd: request.cwd.clone().unwrap_or_default(),
        idle_ms: request.idle_timeout.map(ms).transpose()?,
        lifetime_ms: request.timeout.map(ms).transpose()?,
        place: None,
        hold: None,
        network,
        frozen: Vec::new(),
        steps: Vec::new(),
    })
}
