//! Holding a lease: written before what it names is relied on, renewed while it is needed, removed at the end.
//!
//! The order is what keeps a publisher and a collector apart, and neither needs to lock anything. A holder writes the
//! lease, *then* reads the collectors' records; a collector writes its record, *then* reads the leases. Whichever write
//! came second, its writer sees the other's. A holder that finds one of its names condemned waits until that collection
//! is over, and looks again whether the object is there. `docs/decisions/0007-gc.md` has the argument in full.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use super::clock::{boot_time, origin_now};
use crate::format::lease::{LEASE_SECONDS_MAX, Lease, Purpose};
use crate::format::manifest::FORMAT;
use crate::ids::Digest;
use crate::origin::{Origin, OriginError};
use crate::process::Process;
use crate::store::gc::record;

/// How long a publisher's lease runs.
pub const PUBLISH_TTL: Duration = Duration::from_mins(10);
/// How long a publisher waits for a collection that wants what it needs.
pub const PATIENCE: Duration = Duration::from_mins(15);
/// First and longest pause between two looks at the collectors' records.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// A lease is renewed when this part of its time has passed.
const RENEW_PARTS: u32 = 4;

/// Why something cannot be relied on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The origin failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// A collection wants it and does not end.
    #[error(
        "object `{object}` on origin `{origin}` is being removed by `dsec gc` ({holder}), which has not ended within {waited:?}; try again when it has"
    )]
    Condemned {
        /// The object.
        object: String,
        /// The origin.
        origin: String,
        /// Who collects.
        holder: String,
        /// How long was waited.
        waited: Duration,
    },
}

/// What a lease names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Layers, with everything they refer to.
    pub layers: BTreeSet<Digest>,
    /// Single objects.
    pub objects: BTreeSet<String>,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    /// When it was last written, by [`boot_time`]; `None` before the first time.
    written: Option<Duration>,
    released: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Hold {
    name: String,
    purpose: Purpose,
    ttl: Duration,
    state: Mutex<State>,
    ended: Condvar,
}

impl Hold {
    /// A lease with a name of its own; nothing is written yet.
    pub fn new(purpose: Purpose, ttl: Duration) -> Self {
        Self::named(super::fresh_name(purpose), purpose, ttl)
    }

    /// A lease under a name that an earlier process may have used.
    pub fn named(name: String, purpose: Purpose, ttl: Duration) -> Self {
        Self {
            name,
            purpose,
            ttl,
            state: Mutex::new(State {
                wanted: Wanted::default(),
                written: None,
                released: false,
            }),
            ended: Condvar::new(),
        }
    }

    /// The lease's object.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it names.
    pub fn wanted(&self) -> Wanted {
        self.lock().wanted.clone()
    }

    /// Whether it was written so recently that nobody can take it for over.
    pub fn is_fresh(&self) -> bool {
        let written = self.lock().written;
        written.is_some_and(|at| boot_time().saturating_sub(at) < self.ttl / 2)
    }

    fn lease(&self, wanted: &Wanted) -> Lease {
        let process = match self.purpose {
            Purpose::Publish => Process::me().map_or_else(String::new, ToString::to_string),
            // Mounts and wishes outlive the process that wrote them down.
            Purpose::Mount | Purpose::Pin | Purpose::Untagged => String::new(),
        };
        Lease {
            format: FORMAT,
            holder: super::holder(),
            layers: wanted.layers.iter().copied().collect(),
            objects: wanted.objects.iter().cloned().collect(),
            process,
            purpose: self.purpose,
            seconds: self.ttl.as_secs().clamp(1, LEASE_SECONDS_MAX),
        }
    }

    fn write(&self, origin: &dyn Origin, state: &mut State) -> Result<(), OriginError> {
        // Before the object has its time: what we believe ends no later than what others see.
        let now = boot_time();
        origin.replace(&self.name, &self.lease(&state.wanted).to_bytes())?;
        state.written = Some(now);
        Ok(())
    }

    /// Makes the lease name exactly `wanted`, and waits at most `patience` while a collector is about to remove the lease or
    /// one of the objects `relied_on`. They may be gone afterwards: look.
    ///
    /// # Errors
    /// When the origin fails or the collection does not end. An origin that cannot hold leases cannot be collected: that is
    /// no error.
    pub fn claim(
        &self,
        origin: &dyn Origin,
        wanted: &Wanted,
        relied_on: &BTreeSet<String>,
        patience: Duration,
    ) -> Result<(), HoldError> {
        let begun = boot_time();
        let mut pause = PAUSE.0;
        // The origin's time at `begun`, once it is needed.
        let mut now: Option<SystemTime> = None;
        let mut write = true;
        loop {
            if write {
                let mut state = self.lock();
                state.wanted = wanted.clone();
                match self.write(origin, &mut state) {
                    Err(OriginError::Unsupported { .. }) => return Ok(()),
                    written => written?,
                }
            }
            let waited = boot_time().saturating_sub(begun);
            let records = match record::read_all(origin) {
                Err(OriginError::Unsupported { .. }) => return Ok(()),
                records => records?,
            };
            let at = match (&*records, now) {
                ([], _) => return Ok(()),
                (_, Some(at)) => at,
                _ => {
                    let at = origin_now(origin)?;
                    now = Some(at - waited);
                    at - waited
                }
            };
            let mut live = records.iter().filter(|r| r.is_live(at + waited));
            let found = live.find_map(|r| {
                let object = r.names(relied_on, &self.name)?;
                Some((object, r.holder()))
            });
            let Some((object, holder)) = found else {
                // A collector may have taken the lease for an old one that was over.
                if write {
                    return Ok(());
                }
                write = true;
                continue;
            };
            if waited >= patience {
                return Err(HoldError::Condemned {
                    object,
                    origin: origin.address(),
                    holder,
                    waited,
                });
            }
            tracing::debug!(object, holder, "waiting for a collection to end");
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
            write = false;
        }
    }

    /// Writes the lease again if a good part of its time has passed; whether it did.
    ///
    /// # Errors
    /// When the origin fails: the lease still runs, and should be renewed soon.
    pub fn renew(&self, origin: &dyn Origin) -> Result<bool, OriginError> {
        let mut state = self.lock();
        let due = state
            .written
            .is_some_and(|at| boot_time().saturating_sub(at) >= self.ttl / RENEW_PARTS);
        if due && !state.released {
            self.write(origin, &mut state)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Renews until the lease is released. For a thread of its own.
    pub fn keep_renewing(&self, origin: &dyn Origin) {
        let mut state = self.lock();
        while !state.released {
            let waited = self
                .ended
                .wait_timeout(state, self.ttl / (4 * RENEW_PARTS))
                .unwrap_or_else(PoisonError::into_inner);
            if waited.0.released {
                return;
            }
            drop(waited);
            if let Err(error) = self.renew(origin) {
                tracing::warn!(lease = self.name, %error, "lease not renewed; trying again");
            }
            state = self.lock();
        }
    }

    /// Removes the lease, if it was written or `anyway`. It can be claimed again.
    ///
    /// # Errors
    /// When the origin fails. One that cannot hold leases has none to remove.
    pub fn withdraw(&self, origin: &dyn Origin, anyway: bool) -> Result<(), OriginError> {
        let mut state = self.lock();
        if state.written.is_none() && !anyway {
            return Ok(());
        }
        state.wanted = Wanted::default();
        match origin.remove(&self.name) {
            Err(OriginError::Unsupported { .. }) => {}
            removed => removed?,
        }
        state.written = None;
        Ok(())
    }

    /// Removes the lease and ends the renewing. A failure is only reported: it runs out by itself.
    pub fn release(&self, origin: &dyn Origin) {
        self.lock().released = true;
        self.ended.notify_all();
        if let Err(error) = self.withdraw(origin, false) {
            tracing::warn!(lease = self.name, %error, "lease stays until it runs out");
        }
    }
}

/// Runs `body` with a publisher's lease, which is renewed meanwhile and released at the end, however that comes.
pub fn publishing<T>(origin: &dyn Origin, body: impl FnOnce(&Hold) -> T) -> T {
    struct Released<'a>(&'a Hold, &'a dyn Origin);
    impl Drop for Released<'_> {
        fn drop(&mut self) {
            self.0.release(self.1);
        }
    }
    let hold = Hold::new(Purpose::Publish, PUBLISH_TTL);
    std::thread::scope(|scope| {
        let released = Released(&hold, origin);
        let renewer = std::thread::Builder::new()
            .name("lease".to_owned())
            .spawn_scoped(scope, || hold.keep_renewing(origin));
        if let Err(error) = renewer {
            tracing::warn!(%error, "no thread to renew the lease; it is enough for short work");
        }
        let done = body(&hold);
        drop(released);
        done
    })
}
