//! Rules, and what they say of a destination. Pure.
//!
//! Everything is denied but what a rule allows. Addresses that are special (link-local and with it the metadata services of clouds,
//! multicast, the host's own) are allowed only by a rule that names exactly that address; loopback never is: a sandbox's is its own.

use std::collections::{BTreeSet, HashMap};
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Most rules of one sandbox.
const RULES_MAX: usize = 256;
/// Most ranges of ports of one rule.
const RANGES_MAX: usize = 64;
/// Addresses that are remembered of one name; the set is begun anew above that.
const PINNED_MAX: usize = 256;
/// Names are at most so long.
const NAME_BYTES_MAX: usize = 253;

/// Something that a sandbox may reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// An IPv4 address, a range (`10.0.0.0/8`), or a name.
    pub to: String,
    /// A port, `"8000-8100"`, or a list of those.
    pub port: Ports,
    /// `tcp` or `udp`.
    #[serde(default)]
    pub protocol: Protocol,
}

/// Ports of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum Ports {
    /// One.
    One(u16),
    /// `FIRST-LAST` or one.
    Text(String),
    /// Any of these.
    #[schema(no_recursion)]
    Many(Vec<Ports>),
}

/// Protocol of a rule.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

/// A rule that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("network rule for `{to}`: {why}")]
pub struct BadRule {
    to: String,
    why: String,
}

#[derive(Debug)]
enum Target {
    Net { address: u32, prefix: u32 },
    Name(String),
}

#[derive(Debug)]
struct Parsed {
    target: Target,
    ports: Vec<RangeInclusive<u16>>,
    protocol: Protocol,
}

/// What is said of a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Allowed by its address.
    Allowed,
    /// Allowed because one of these names had this address.
    Named(Vec<String>),
    /// Not allowed.
    Denied,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Policy {
    rules: Vec<Parsed>,
    pinned: Mutex<HashMap<String, BTreeSet<Ipv4Addr>>>,
}

fn parse_ports(ports: &Ports, out: &mut Vec<RangeInclusive<u16>>) -> Result<(), String> {
    match ports {
        Ports::One(port) => out.push(*port..=*port),
        Ports::Text(text) => {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let number = |text: &str| text.trim().parse::<u16>();
            match (number(first), number(last)) {
                (Ok(first), Ok(last)) if first <= last => out.push(first..=last),
                _ => {
                    return Err(format!(
                        "`port` of `{text}`: a number or `FIRST-LAST` is expected"
                    ));
                }
            }
        }
        Ports::Many(all) => {
            for one in all {
                if matches!(one, Ports::Many(_)) {
                    return Err("`port` is a list of lists".to_owned());
                }
                parse_ports(one, out)?;
            }
        }
    }
    if out.is_empty() || out.len() > RANGES_MAX {
        return Err(format!("`port`: 1 to {RANGES_MAX} are expected"));
    }
    if out.iter().any(|range| *range.start() == 0) {
        return Err("port 0 does not exist".to_owned());
    }
    Ok(())
}

fn mask(prefix: u32) -> u32 {
    u32::MAX.checked_shl(32 - prefix).unwrap_or(0)
}

fn parse_target(to: &str) -> Result<Target, String> {
    if to.contains(':') {
        return Err("IPv6 is not available: a sandbox reaches IPv4 alone".to_owned());
    }
    let (address, prefix) = match to.split_once('/') {
        Some((address, prefix)) => (address, prefix.parse().ok().filter(|p| *p <= 32)),
        None => (to, Some(32)),
    };
    if let Ok(parsed) = address.parse::<Ipv4Addr>() {
        let Some(prefix) = prefix else {
            return Err("a range is `ADDRESS/0` to `ADDRESS/32`".to_owned());
        };
        let address = parsed.to_bits();
        if address & !mask(prefix) != 0 {
            let base = Ipv4Addr::from_bits(address & mask(prefix));
            return Err(format!("has bits beyond its prefix; `{base}/{prefix}`?"));
        }
        if parsed.is_loopback() {
            return Err(
                "a sandbox's loopback is its own; name another address of the host".to_owned(),
            );
        }
        return Ok(Target::Net { address, prefix });
    }
    let name = to.trim_end_matches('.').to_ascii_lowercase();
    let label = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        !label.is_empty() && label.len() <= 63 && label.bytes().all(inner)
    };
    let number = name
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    if name.len() > NAME_BYTES_MAX || number || !name.split('.').all(label) {
        return Err(
            "neither an IPv4 address, a range, nor a name (patterns are not available)".to_owned(),
        );
    }
    Ok(Target::Name(name))
}

impl Policy {
    /// Understands rules.
    ///
    /// # Errors
    /// [`BadRule`] for the first that makes no sense.
    pub fn new(rules: &[Rule]) -> Result<Self, BadRule> {
        let bad = |to: &str, why: String| BadRule {
            to: to.to_owned(),
            why,
        };
        if rules.len() > RULES_MAX {
            let why = format!("{} rules; {RULES_MAX} at most are expected", rules.len());
            return Err(bad("…", why));
        }
        let mut parsed = Vec::new();
        for rule in rules {
            let mut ports = Vec::new();
            parse_ports(&rule.port, &mut ports).map_err(|why| bad(&rule.to, why))?;
            let target = parse_target(&rule.to).map_err(|why| bad(&rule.to, why))?;
            let quic = rule.protocol == Protocol::Udp && ports.iter().any(|r| r.contains(&443));
            if quic && matches!(target, Target::Name(_)) {
                let why =
                    "UDP port 443 by name: QUIC hides the name that is asked for; give an address";
                return Err(bad(&rule.to, why.to_owned()));
            }
            parsed.push(Parsed {
                target,
                ports,
                protocol: rule.protocol,
            });
        }
        Ok(Self {
            rules: parsed,
            pinned: Mutex::default(),
        })
    }

    fn pinned(&self) -> MutexGuard<'_, HashMap<String, BTreeSet<Ipv4Addr>>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the rules say of a flow; `own` tells whether an address is the host's.
    pub fn verdict(
        &self,
        (address, port): (Ipv4Addr, u16),
        protocol: Protocol,
        own: impl Fn(Ipv4Addr) -> bool,
    ) -> Verdict {
        if address.is_loopback() {
            return Verdict::Denied;
        }
        let special = special(address) || own(address);
        let pinned = self.pinned();
        let mut names = Vec::new();
        for rule in &self.rules {
            let here = rule.protocol == protocol && rule.ports.iter().any(|r| r.contains(&port));
            match &rule.target {
                _ if !here => {}
                Target::Net {
                    address: base,
                    prefix,
                } => {
                    let inside = address.to_bits() & mask(*prefix) == *base;
                    if inside && (!special || *prefix == 32) {
                        return Verdict::Allowed;
                    }
                }
                Target::Name(name) => {
                    let had = pinned.get(name).is_some_and(|all| all.contains(&address));
                    if had && !special {
                        names.push(name.clone());
                    }
                }
            }
        }
        if names.is_empty() {
            Verdict::Denied
        } else {
            Verdict::Named(names)
        }
    }

    /// Whether a rule names `name` (in lower case, without a last dot).
    pub fn knows(&self, name: &str) -> bool {
        let is = |rule: &Parsed| matches!(&rule.target, Target::Name(n) if n == name);
        self.rules.iter().any(is)
    }

    /// Notes what a name was found to be; what of it may be told. Special addresses are not: a name that leads to the host or to
    /// a metadata service is somebody's trick.
    pub fn pin(
        &self,
        name: &str,
        found: Vec<Ipv4Addr>,
        own: impl Fn(Ipv4Addr) -> bool,
    ) -> Vec<Ipv4Addr> {
        let usual =
            |address: &Ipv4Addr| !address.is_loopback() && !special(*address) && !own(*address);
        let found: Vec<Ipv4Addr> = found.into_iter().filter(usual).collect();
        let mut pinned = self.pinned();
        let known = pinned.entry(name.to_owned()).or_default();
        if known.len() + found.len() > PINNED_MAX {
            known.clear();
        }
        known.extend(found.iter().take(PINNED_MAX));
        found
    }
}

/// Addresses that a range or a name does not reach.
fn special(address: Ipv4Addr) -> bool {
    address.is_link_local()
        || address.is_multicast()
        || address.is_broadcast()
        || address.octets().first() == Some(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(json: &str) -> Result<Policy, String> {
        let rules: Vec<Rule> = serde_json::from_str(json).map_err(|e| e.to_string())?;
        Policy::new(&rules).map_err(|e| e.to_string())
    }

    fn ip(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    /// Mutations that were seen to fail: `special` taken for usual; a range that ends one port early.
    #[test]
    fn only_what_a_rule_names_is_allowed() {
        let policy = policy(
            r#"[{"to": "10.0.0.0/8", "port": [443, "8000-8100"]}, {"to": "1.2.3.4", "port": 53, "protocol": "udp"},
                {"to": "169.254.0.0/16", "port": 80}, {"to": "169.254.1.1", "port": 80}, {"to": "0.0.0.0/0", "port": 22},
                {"to": "Pkg.example.", "port": 443}]"#,
        )
        .unwrap();
        let own = |address: Ipv4Addr| address == ip("10.0.0.7");
        let says =
            |address: &str, port, protocol| policy.verdict((ip(address), port), protocol, own);
        use Protocol::{Tcp, Udp};
        for (address, port, protocol) in [
            ("10.255.0.1", 443, Tcp),
            ("10.0.0.1", 8000, Tcp),
            ("10.0.0.1", 8100, Tcp),
            ("1.2.3.4", 53, Udp),
            ("169.254.1.1", 80, Tcp),
            ("8.8.8.8", 22, Tcp),
        ] {
            assert_eq!(
                says(address, port, protocol),
                Verdict::Allowed,
                "{address}:{port}"
            );
        }
        for (address, port, protocol) in [
            ("11.0.0.1", 443, Tcp),
            ("10.0.0.1", 8101, Tcp),
            ("10.0.0.1", 443, Udp),
            ("1.2.3.4", 53, Tcp),
            ("169.254.169.254", 80, Tcp),
            ("10.0.0.7", 443, Tcp),
            ("127.0.0.1", 22, Tcp),
            ("224.0.0.1", 22, Tcp),
            ("0.0.0.0", 22, Tcp),
            ("9.9.9.9", 443, Tcp),
        ] {
            assert_eq!(
                says(address, port, protocol),
                Verdict::Denied,
                "{address}:{port}"
            );
        }
        assert!(policy.knows("pkg.example") && !policy.knows("example"));
        let found = ["9.9.9.9", "127.0.0.1", "169.254.169.254", "10.0.0.7"].map(ip);
        assert_eq!(
            policy.pin("pkg.example", found.to_vec(), own),
            [ip("9.9.9.9")]
        );
        let named = Verdict::Named(vec!["pkg.example".to_owned()]);
        assert_eq!(says("9.9.9.9", 443, Tcp), named);
        assert_eq!(says("9.9.9.9", 444, Tcp), Verdict::Denied);
    }

    #[test]
    fn rules_that_make_no_sense_are_refused_in_words() {
        for (rule, word) in [
            (r#"[{"to": "10.0.0.1/8", "port": 1}]"#, "`10.0.0.0/8`?"),
            (r#"[{"to": "10.0.0.0/33", "port": 1}]"#, "range"),
            (r#"[{"to": "127.0.0.1", "port": 1}]"#, "loopback"),
            (r#"[{"to": "fd00::1", "port": 1}]"#, "IPv6"),
            (r#"[{"to": "*.example", "port": 1}]"#, "patterns"),
            (r#"[{"to": "1.2.3", "port": 1}]"#, "neither"),
            (r#"[{"to": "1.2.3.4", "port": "9-1"}]"#, "FIRST-LAST"),
            (r#"[{"to": "1.2.3.4", "port": 0}]"#, "port 0"),
            (r#"[{"to": "1.2.3.4", "port": []}]"#, "expected"),
            (
                r#"[{"to": "a.example", "port": 443, "protocol": "udp"}]"#,
                "QUIC",
            ),
            (r#"[{"to": "1.2.3.4"}]"#, "port"),
            (r#"["1.1.1.1:53/udp"]"#, "struct Rule"),
        ] {
            let error = policy(rule).err().unwrap_or_default();
            assert!(error.contains(word), "{rule}: {error}");
        }
    }
}
