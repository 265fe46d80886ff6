//! API keys for `sandboxd`: made here, known there by their hash only.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::commands::Failure;
use crate::output;

/// Random bytes of a key.
const KEY_BYTES: usize = 20;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}

/// Makes a key, prints it, and writes its line to a file or to standard error.
///
/// # Errors
/// When the project's name is none, or the file cannot be written.
pub(super) fn make(project: &str, file: Option<&Path>) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if project.is_empty() || !project.chars().all(plain) {
        return Err("a project's name is made of letters, digits, `-`, `_` and `.`".into());
    }
    let mut random = [0; KEY_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    // In the form that E2B's clients check, so that one key serves both.
    let key = format!("e2b_{}", hex(&random));
    let line = format!("{} {project}", hex(&Sha256::digest(key.as_bytes())));
    match file {
        Some(path) => {
            let mut options = File::options();
            let mut file = options.create(true).append(true).mode(0o600).open(path)?;
            file.write_all(format!("{line}\n").as_bytes())?;
        }
        None => output::note(&line),
    }
    output::line(&key);
    Ok(())
}
