//! An image's config: what to run, on which machine, and the digests of its plain layers.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::SourceError;

/// Largest JSON document of an image that is read (bytes).
pub(super) const JSON_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, Deserialize)]
pub(super) struct ImageConfig {
    #[serde(default)]
    pub(super) architecture: String,
    #[serde(default)]
    pub(super) os: String,
    pub(super) rootfs: RootFs,
    #[serde(default)]
    config: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct RootFs {
    #[serde(default)]
    pub(super) diff_ids: Vec<String>,
}

/// Fields of the config that are kept, and the labels they become.
const KEPT: [(&str, &str); 6] = [
    ("Entrypoint", "oci.entrypoint"),
    ("Cmd", "oci.cmd"),
    ("Env", "oci.env"),
    ("User", "oci.user"),
    ("WorkingDir", "oci.workdir"),
    ("Labels", "oci.labels"),
];

impl ImageConfig {
    pub(super) fn parse(bytes: &[u8], image: &str) -> Result<Self, SourceError> {
        serde_json::from_slice(bytes).map_err(|e| SourceError::Image {
            image: image.to_owned(),
            what: "its config is no image config",
            found: e.to_string(),
        })
    }

    /// The labels, each a JSON text.
    pub(super) fn labels(&self) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        for (field, label) in KEPT {
            let value = self.config.as_ref().and_then(|config| config.get(field));
            if let Some(value) = value.filter(|value| !value.is_null()) {
                labels.insert(label.to_owned(), value.to_string());
            }
        }
        for (label, value) in [
            ("oci.architecture", &self.architecture),
            ("oci.os", &self.os),
        ] {
            if !value.is_empty() {
                let json = serde_json::Value::from(value.as_str());
                labels.insert(label.to_owned(), json.to_string());
            }
        }
        labels
    }
}
