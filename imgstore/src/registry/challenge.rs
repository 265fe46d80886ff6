//! `WWW-Authenticate`: how a registry wants to be told who asks.
//!
//! A server may name several ways, in several headers or in one, and ways that nobody here knows. The first `Bearer` is
//! taken, else `Basic`.

use reqwest::header::{HeaderMap, WWW_AUTHENTICATE};

/// Longest headers that are looked at together (bytes).
const BYTES_MAX: usize = 16 << 10;

/// A way that is known here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    /// Ask `realm` for a token for `service`.
    Bearer {
        realm: String,
        service: Option<String>,
    },
    /// User and password with each request.
    Basic,
}

#[derive(Debug)]
struct Named {
    scheme: String,
    parameters: Vec<(String, String)>,
}

impl Named {
    fn parameter(&self, name: &str) -> Option<String> {
        let found = self.parameters.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.clone())
    }
}

/// Parts of a header between commas and spaces; a quoted text is one part with what stands before it.
fn parts(text: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let (mut quoted, mut escaped) = (false, false);
    for c in text.chars() {
        let first = out.len() == 1;
        let Some(last) = out.last_mut() else { break };
        match c {
            _ if escaped => {
                last.push(c);
                escaped = false;
            }
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ',' | ' ' | '\t' if !quoted => {
                // `key = value` has spaces around its sign in some servers.
                if !last.is_empty() && !last.ends_with('=') {
                    out.push(String::new());
                }
            }
            '=' if !quoted && last.is_empty() && !first => {
                out.pop();
                if let Some(before) = out.last_mut() {
                    before.push('=');
                }
            }
            c => last.push(c),
        }
    }
    out.retain(|part| !part.is_empty());
    out
}

fn named(headers: &HeaderMap) -> Vec<Named> {
    let mut out: Vec<Named> = Vec::new();
    let mut bytes = 0;
    for header in headers.get_all(WWW_AUTHENTICATE) {
        bytes += header.len();
        let Ok(text) = header.to_str() else { continue };
        if bytes > BYTES_MAX {
            break;
        }
        for part in parts(text) {
            match (part.split_once('='), out.last_mut()) {
                (Some((key, value)), Some(challenge)) => challenge
                    .parameters
                    .push((key.to_ascii_lowercase(), value.to_owned())),
                (Some(_), None) => {}
                (None, _) => out.push(Named {
                    scheme: part.to_ascii_lowercase(),
                    parameters: Vec::new(),
                }),
            }
        }
    }
    out
}

/// The way to take, if one is known.
pub(super) fn choose(headers: &HeaderMap) -> Option<Challenge> {
    let all = named(headers);
    let bearer = all.iter().filter(|c| c.scheme == "bearer").find_map(|c| {
        Some(Challenge::Bearer {
            realm: c.parameter("realm")?,
            service: c.parameter("service"),
        })
    });
    bearer.or_else(|| {
        all.iter()
            .any(|c| c.scheme == "basic")
            .then_some(Challenge::Basic)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(headers: &[&str]) -> Option<Challenge> {
        let mut map = HeaderMap::new();
        for value in headers {
            map.append(WWW_AUTHENTICATE, value.parse().unwrap());
        }
        choose(&map)
    }

    fn bearer(realm: &str, service: Option<&str>) -> Option<Challenge> {
        Some(Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.map(str::to_owned),
        })
    }

    #[test]
    fn the_known_way_is_taken_among_several() {
        let full =
            r#"Bearer realm="https://a/t?x=1,2",service="s p",scope="repository:a/b:pull,push""#;
        assert_eq!(chosen(&[full]), bearer("https://a/t?x=1,2", Some("s p")));
        let basic = r#"Basic realm="r""#;
        assert_eq!(chosen(&[basic]), Some(Challenge::Basic));
        for headers in [
            &[basic, full][..],
            &[full, basic],
            &["Negotiate", "NTLM abc==", full],
            &[&format!("{basic}, {full}")],
            &[&format!("Negotiate, {full}, {basic}")],
            &[&format!("Digest realm=\"d\", nonce=\"Bearer x\", {full}")],
        ] {
            assert_eq!(
                chosen(headers),
                bearer("https://a/t?x=1,2", Some("s p")),
                "{headers:?}"
            );
        }
        assert_eq!(
            chosen(&["bearer REALM = https://a , Service = s"]),
            bearer("https://a", Some("s"))
        );
        assert_eq!(chosen(&[r#"Bearer realm="a\"b""#]), bearer("a\"b", None));
        assert_eq!(chosen(&["Bearer", basic]), Some(Challenge::Basic));
        assert_eq!(
            chosen(&[r#"Digest realm="x""#, "", ",,= =", "\"", "=x"]),
            None
        );
    }
}
