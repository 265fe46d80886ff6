//! Which server a bucket is on: endpoint, region and the form of addresses.
//!
//! `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` or the profile's `endpoint_url`; `AWS_REGION`, `AWS_DEFAULT_REGION` or the
//! profile's `region`. The bucket is part of the path (`https://server/bucket/…`); with
//! `AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true` it is part of the host's name.

use std::net::IpAddr;

use super::profile::ProfileFiles;
use crate::credentials::environment::Environment;

/// The region of servers that have none, and of AWS where nobody names another.
const REGION: &str = "us-east-1";

/// See the head of this file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) endpoint: Option<String>,
    pub(super) region: String,
    pub(super) allow_http: bool,
    pub(super) virtual_hosted: bool,
}

/// Whether a `host[:port]` is this machine.
pub(crate) fn is_loopback(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl Place {
    pub(super) fn new(env: &Environment) -> Result<Self, String> {
        let profile = ProfileFiles::new(env).read()?;
        let endpoint = env
            .get("AWS_ENDPOINT_URL_S3")
            .or_else(|| env.get("AWS_ENDPOINT_URL"))
            .or_else(|| profile.get("endpoint_url"))
            .map(|url| url.trim_end_matches('/').to_owned());
        let region = env
            .get("AWS_REGION")
            .or_else(|| env.get("AWS_DEFAULT_REGION"))
            .or_else(|| profile.get("region"))
            .unwrap_or(REGION);
        let plain = endpoint.as_deref().and_then(|u| u.strip_prefix("http://"));
        let allow_http = match plain {
            None => false,
            Some(rest) => {
                let host = rest.split('/').next().unwrap_or_default();
                if !is_loopback(host) && !env.says_yes("AWS_ALLOW_HTTP") {
                    return Err(format!(
                        "the endpoint `http://{host}` is neither encrypted nor on this host; use \
                         `https://`, or set AWS_ALLOW_HTTP=true if the network is trusted"
                    ));
                }
                true
            }
        };
        Ok(Self {
            region: region.to_owned(),
            allow_http,
            virtual_hosted: env.says_yes("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"),
            endpoint,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_for_this_host_or_on_demand() {
        let at = |url: &str| Place::new(&Environment::of([("AWS_ENDPOINT_URL", url)]));
        for url in [
            "http://127.0.0.1:9000/",
            "http://localhost",
            "http://[::1]:1",
        ] {
            let place = at(url).unwrap();
            assert!(place.allow_http, "{url}");
            assert_eq!(place.endpoint.as_deref(), Some(url.trim_end_matches('/')));
            assert_eq!(place.region, "us-east-1");
        }
        assert!(!at("https://minio.example").unwrap().allow_http);
        for url in ["http://minio.example", "http://127.0.0.1.example"] {
            assert!(at(url).unwrap_err().contains("AWS_ALLOW_HTTP"), "{url}");
        }
        let env = [
            ("AWS_ENDPOINT_URL", "http://minio"),
            ("AWS_ALLOW_HTTP", "true"),
        ];
        assert!(Place::new(&Environment::of(env)).unwrap().allow_http);
    }
}
