//! `s3://bucket/prefix`.

use std::fmt;

use object_store::path::Path;

/// A bucket, and the prefix in it under which our objects are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Address {
    /// The bucket's name.
    pub bucket: String,
    /// Without slashes at its ends; may be empty.
    pub prefix: String,
}

impl S3Address {
    /// Parses what follows `s3://`.
    pub fn parse(rest: &str) -> Option<Self> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let fine = |b: u8| letter(b) || b == b'.' || b == b'-' || b == b'_';
        let named = (3..=63).contains(&bucket.len())
            && bucket.bytes().all(fine)
            && bucket.bytes().next().is_some_and(letter);
        let prefix = prefix.trim_matches('/');
        let usual = prefix
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"/._-+=!@".contains(&b));
        let plain = prefix.is_empty() || Path::parse(prefix).is_ok();
        (named && usual && plain).then(|| Self {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    }

    /// Where an object or folder of ours is in the bucket.
    pub(super) fn key(&self, object: &str) -> String {
        if self.prefix.is_empty() {
            object.to_owned()
        } else {
            format!("{}/{object}", self.prefix)
        }
    }

    /// Our name of what is at `key`, if it is under the prefix.
    pub(super) fn object(&self, key: &str) -> Option<String> {
        if self.prefix.is_empty() {
            return Some(key.to_owned());
        }
        let rest = key.strip_prefix(self.prefix.as_str())?;
        Some(rest.strip_prefix('/')?.to_owned())
    }
}

impl fmt::Display for S3Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if self.prefix.is_empty() {
            Ok(())
        } else {
            write!(f, "/{}", self.prefix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parsed = |text| S3Address::parse(text).map(|a| (a.to_string(), a.key("index.json")));
        let is = |a: &str, k: &str| Some((a.to_owned(), k.to_owned()));
        assert_eq!(parsed("layers"), is("s3://layers", "index.json"));
        assert_eq!(parsed("layers/"), is("s3://layers", "index.json"));
        assert_eq!(
            parsed("my.layers/a/b/"),
            is("s3://my.layers/a/b", "a/b/index.json")
        );
        for bad in [
            "", "/a", "ab", "UPPER", "-abc", "abc/a//b", "abc/../b", "abc/a?b", "a:b@c/d",
        ] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
        let address = S3Address::parse("abc/p").unwrap();
        assert_eq!(address.object("p/tags/x").as_deref(), Some("tags/x"));
        assert_eq!(address.object("pp/tags/x"), None);
    }
}
