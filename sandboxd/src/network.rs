//! What sandboxes may reach: rules, and the gate that is the only way out.
//!
//! A sandbox's network namespace has the loopback interface and nothing else; no packet leaves it. If it has rules, every address is
//! made local there, and a filter hands what goes elsewhere than its own loopback to two sockets of the daemon that live in that
//! namespace (`inside`). The daemon looks at each flow's destination and makes a connection of its own from the host
//! (`relay`) if a rule allows it (`policy`). So nothing of the host's network is set up or changed, and without the daemon there is
//! no way out. Names are looked up by the daemon alone (`dns`); addresses that a name had are the name's.
//!
//! Namespaces come with their shells, made ahead and used once: nothing is carried over.

mod dns;
mod inside;
mod netlink;
pub mod policy;
mod relay;
mod tls;

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::AbortHandle;

use policy::{Policy, Rule};

/// Why a sandbox has no network.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A rule is wrong.
    #[error(transparent)]
    Rule(#[from] policy::BadRule),
    /// The kernel would not.
    #[error("the sandbox's network, {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Names with fixed addresses, as in `/etc/hosts`; others are looked up as this host does.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    names: HashMap<String, Vec<Ipv4Addr>>,
}

impl Hosts {
    /// Reads a file of lines `ADDRESS NAME…`; what follows a `#` says nothing.
    ///
    /// # Errors
    /// In words: when it cannot be read or a line is not of that form.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("cannot read `{}`: {e}", path.display()))?;
        let mut names: HashMap<String, Vec<Ipv4Addr>> = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            let Some(address) = words.next() else {
                continue;
            };
            let address = address.parse().map_err(|e| {
                let number = number + 1;
                format!("`{}` line {number}: `{address}`: {e}", path.display())
            })?;
            for name in words {
                let known = names.entry(name.to_ascii_lowercase()).or_default();
                known.push(address);
            }
        }
        Ok(Self { names })
    }

    async fn look_up(&self, name: &str) -> io::Result<Vec<Ipv4Addr>> {
        if let Some(known) = self.names.get(name) {
            return Ok(known.clone());
        }
        let found = tokio::net::lookup_host((name, 0)).await?;
        let found = found.filter_map(|address| match address.ip() {
            std::net::IpAddr::V4(address) => Some(address),
            std::net::IpAddr::V6(_) => None,
        });
        Ok(found.collect())
    }
}

/// The gates of all sandboxes that have rules.
#[derive(Debug, Default)]
pub struct Networks {
    hosts: Arc<Hosts>,
    open: Mutex<HashMap<String, AbortHandle>>,
}

impl Networks {
    /// No gates yet.
    pub fn new(hosts: Hosts) -> Self {
        Self {
            hosts: Arc::new(hosts),
            open: Mutex::default(),
        }
    }

    fn gates(&self) -> std::sync::MutexGuard<'_, HashMap<String, AbortHandle>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the gate of sandbox `id`, whose packets appear in `namespace`; one that is open is replaced. Blocks, within a runtime.
    ///
    /// # Errors
    /// See [`NetworkError`]; there is no way out then.
    pub fn open(&self, id: &str, namespace: OwnedFd, rules: &[Rule]) -> Result<(), NetworkError> {
        if rules.is_empty() {
            return Ok(());
        }
        let policy = Policy::new(rules)?;
        let inside = inside::set_up(namespace)?;
        let gate = relay::Gate::new(policy, Arc::clone(&self.hosts), inside)?;
        let task = tokio::runtime::Handle::current().spawn(gate.run());
        let before = self.gates().insert(id.to_owned(), task.abort_handle());
        if let Some(before) = before {
            before.abort();
        }
        Ok(())
    }

    /// Closes a gate, with all that goes through it.
    pub fn close(&self, id: &str) {
        if let Some(gate) = self.gates().remove(id) {
            gate.abort();
        }
    }
}
