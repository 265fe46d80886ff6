//! Tokens for single sandboxes: whoever made one hands its token on without handing on a key.
//!
//! A token is an HMAC of the sandbox's id under a secret of this daemon's state folder. So none is kept anywhere, and all
//! survive a restart.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use sha2::{Digest as _, Sha256};

/// SHA-256's block (FIPS 180-4, 6.2).
const BLOCK_BYTES: usize = 64;

/// See the head of this file.
pub(crate) struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// The secret of a state folder, made at its first use.
    ///
    /// # Errors
    /// What the disk says, or that the file holds something else.
    pub(crate) fn open(state: &Path) -> io::Result<Self> {
        let path = state.join("secret");
        match fs::read(&path) {
            Ok(bytes) => bytes.try_into().map(Self).map_err(|bytes: Vec<u8>| {
                let message = format!(
                    "`{}` has {} bytes, 32 are expected: remove it to make another (tokens that were given out end then)",
                    path.display(),
                    bytes.len()
                );
                io::Error::new(io::ErrorKind::InvalidData, message)
            }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let mut secret = [0; 32];
                let filled = rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
                assert_eq!(filled, secret.len(), "the kernel fills short buffers");
                let temporary = state.join("secret.tmp");
                let mut options = fs::File::options();
                let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
                file.write_all(&secret)?;
                file.sync_all()?;
                fs::rename(&temporary, &path)?;
                Ok(Self(secret))
            }
            Err(error) => Err(error),
        }
    }

    /// The token of a sandbox for a purpose.
    pub(crate) fn token(&self, purpose: &str, id: &str) -> String {
        let mac = hmac(&self.0, format!("{purpose}\n{id}").as_bytes());
        mac.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string takes everything");
            text
        })
    }
}

/// HMAC-SHA-256 (RFC 2104) with a key not longer than a block.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let padded = |with: u8| {
        let mut block = [with; BLOCK_BYTES];
        for (to, from) in block.iter_mut().zip(key) {
            *to ^= from;
        }
        block
    };
    let inner = Sha256::new()
        .chain_update(padded(0x36))
        .chain_update(message)
        .finalize();
    let outer = Sha256::new().chain_update(padded(0x5c)).chain_update(inner);
    outer.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 2. Mutation: with the pads exchanged it fails.
    #[test]
    fn the_mac_is_the_standard_one() {
        let mac = hmac(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(mac[..4], [0x5b, 0xdc, 0xc1, 0x46]);
        assert_eq!(mac[28..], [0x64, 0xec, 0x38, 0x43]);
    }

    /// Mutations: a token of the purpose alone; of the id alone; a secret that is not renamed to its name.
    #[test]
    fn a_secret_stays_and_its_tokens_differ_by_sandbox_and_purpose() {
        let dir = tempfile::tempdir().unwrap();
        let first = Secret::open(dir.path()).unwrap();
        let again = Secret::open(dir.path()).unwrap();
        assert_eq!(first.token("envd", "sb-1"), again.token("envd", "sb-1"));
        assert_ne!(first.token("envd", "sb-1"), first.token("envd", "sb-2"));
        assert_ne!(first.token("envd", "sb-1"), first.token("traffic", "sb-1"));
        fs::write(dir.path().join("secret"), b"short").unwrap();
        assert!(Secret::open(dir.path()).is_err());
    }
}
