//! The manifest that makes one object of ours out of a blob: an OCI image manifest of one layer.

use std::collections::BTreeMap;
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

use crate::registry::reference::is_sha256;

/// The type of the manifest.
pub(super) const MEDIA_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// What the artifact is; registries show it.
const OBJECT_TYPE: &str = "application/vnd.dsec.object.v1";
/// Annotation: the object's name.
const NAME: &str = "dev.dsec.object";
/// Annotation: when it was stored, by the clock of who stored it.
const CREATED: &str = "org.opencontainers.image.created";
/// The empty configuration that every artifact has.
pub(super) const EMPTY: &[u8] = b"{}";
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
const EMPTY_DIGEST: &str =
    "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: u32,
    media_type: String,
    #[serde(default)]
    artifact_type: String,
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// What the manifest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// The object's name.
    pub(super) object: String,
    /// The blob's digest.
    pub(super) digest: String,
    /// The blob's size.
    pub(super) size: u64,
    /// When it was stored.
    pub(super) created: SystemTime,
}

impl Record {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let created =
            DateTime::<Utc>::from(self.created).to_rfc3339_opts(SecondsFormat::Millis, true);
        let descriptor = |kind: &str, digest: &str, size| Descriptor {
            media_type: kind.to_owned(),
            digest: digest.to_owned(),
            size,
        };
        let document = Document {
            schema_version: 2,
            media_type: MEDIA_TYPE.to_owned(),
            artifact_type: OBJECT_TYPE.to_owned(),
            config: descriptor(EMPTY_TYPE, EMPTY_DIGEST, 2),
            layers: vec![descriptor(OBJECT_TYPE, &self.digest, self.size)],
            annotations: BTreeMap::from([
                (NAME.to_owned(), self.object.clone()),
                (CREATED.to_owned(), created),
            ]),
        };
        serde_json::to_vec(&document).expect("texts and numbers are JSON")
    }

    /// Reads a manifest; a text says what it is if it is none of ours.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let document: Document = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let [layer] = document.layers.as_slice() else {
            return Err(format!("a manifest of {} layers", document.layers.len()));
        };
        let note = |name: &str| document.annotations.get(name).cloned();
        let object = note(NAME).ok_or("a manifest of something else")?;
        let created = note(CREATED).ok_or("a manifest without a time")?;
        let created = DateTime::parse_from_rfc3339(&created).map_err(|e| e.to_string())?;
        if !is_sha256(&layer.digest) {
            return Err("a digest that is no sha256".to_owned());
        }
        Ok(Self {
            object,
            digest: layer.digest.clone(),
            size: layer.size,
            created: created.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back() {
        let record = Record {
            object: "tags/base/a/1.json".to_owned(),
            digest: crate::registry::api::sha256_hex(b"x"),
            size: 7,
            created: SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1_764_000_000_123),
        };
        assert_eq!(Record::parse(&record.to_bytes()).unwrap(), record);
        assert_eq!(crate::registry::api::sha256_hex(EMPTY), EMPTY_DIGEST);
        for bad in ["", "{}", "[]", r#"{"schemaVersion":2}"#] {
            assert!(Record::parse(bad.as_bytes()).is_err());
        }
        let text = String::from_utf8(record.to_bytes()).unwrap();
        for (from, to) in [
            ("sha256:2d", "sha256:../"),
            ("dev.dsec.object", "x"),
            ("2025-", "x"),
        ] {
            assert!(text.contains(from), "{from}");
            assert!(
                Record::parse(text.replace(from, to).as_bytes()).is_err(),
                "{to}"
            );
        }
    }
}
