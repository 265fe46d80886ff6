//! Who a process runs as: names looked up in the sandbox's own `/etc/passwd` and `/etc/group`.
//!
//! These files belong to the sandbox and may say anything: the worst they can do is to choose another of the sandbox's own
//! ids. They are read with bounds.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::OnceLock;

/// Most bytes read of each file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Most supplementary groups.
const GROUPS_MAX: usize = 64;

/// A user of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
}

fn read(path: &str) -> String {
    let mut bytes = Vec::new();
    // A file that is not there or not readable names nobody.
    let file = rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::NONBLOCK,
        rustix::fs::Mode::empty(),
    );
    if let Ok(file) = file
        && File::from(file)
            .take(FILE_BYTES_MAX)
            .read_to_end(&mut bytes)
            .is_err()
    {
        return String::new();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The user that `wanted` (`name`, `uid`, either with `:group`; empty = root) stands for.
///
/// # Errors
/// When a name is in neither file.
pub(crate) fn find(wanted: &str) -> io::Result<User> {
    find_in(wanted, &read("/etc/passwd"), &read("/etc/group"))
}

/// Makes this process work on files as a user of the sandbox, from that user's home.
///
/// # Errors
/// When there is no such user, or the kernel refuses.
pub(crate) fn work_as(wanted: &str) -> io::Result<()> {
    use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
    let user = find(wanted).map_err(|e| {
        let message = format!("no user `{wanted}` in the sandbox's /etc/passwd");
        io::Error::new(
            if e.kind() == io::ErrorKind::NotFound {
                io::ErrorKind::InvalidInput
            } else {
                e.kind()
            },
            message,
        )
    })?;
    let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    setgroups(&groups)?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    // A user without a home begins at `/`, where this process is.
    std::env::set_current_dir(&user.home).or_else(|_missing| std::env::set_current_dir("/"))
}

fn named(file: &str, id: u32) -> Option<String> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_owned())
    })
}

/// A user's name, or its number where it has none.
pub(crate) fn name_of(uid: u32) -> String {
    static PASSWD: OnceLock<String> = OnceLock::new();
    named(PASSWD.get_or_init(|| read("/etc/passwd")), uid).unwrap_or_else(|| uid.to_string())
}

/// A group's name, or its number where it has none.
pub(crate) fn name_of_group(gid: u32) -> String {
    static GROUP: OnceLock<String> = OnceLock::new();
    named(GROUP.get_or_init(|| read("/etc/group")), gid).unwrap_or_else(|| gid.to_string())
}

fn find_in(wanted: &str, passwd: &str, group: &str) -> io::Result<User> {
    let wanted = if wanted.is_empty() { "0" } else { wanted };
    let (name, group_name) = wanted
        .split_once(':')
        .map_or((wanted, None), |(name, group)| (name, Some(group)));
    let number: Option<u32> = name.parse().ok();
    let entry = passwd
        .lines()
        .map(|l| l.split(':').collect())
        .find_map(|fields: Vec<&str>| {
            let [n, _, uid, gid, _, home, ..] = *fields else {
                return None;
            };
            let (uid, gid): (u32, u32) = (uid.parse().ok()?, gid.parse().ok()?);
            (n == name || number == Some(uid)).then(|| (n.to_owned(), uid, gid, home.to_owned()))
        });
    let (name, uid, mut gid, home) = match (entry, number) {
        (Some(entry), _) => entry,
        (None, Some(0)) => ("root".to_owned(), 0, 0, "/root".to_owned()),
        (None, Some(uid)) => (uid.to_string(), uid, uid, "/".to_owned()),
        (None, None) => return Err(io::ErrorKind::NotFound.into()),
    };
    let groups: Vec<(&str, u32, &str)> = group
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let gid = fields.nth(1)?.parse().ok()?;
            Some((name, gid, fields.next().unwrap_or_default()))
        })
        .collect();
    if let Some(wanted) = group_name {
        let named = groups.iter().find(|(name, ..)| *name == wanted);
        gid = match (wanted.parse(), named) {
            (Ok(gid), _) => gid,
            (_, Some((_, gid, _))) => *gid,
            _ => return Err(io::ErrorKind::NotFound.into()),
        };
    }
    let member = |members: &str| members.split(',').any(|member| member == name);
    let mine = groups.iter().filter(|(_, _, members)| member(members));
    let mut groups: Vec<u32> = mine.map(|(_, gid, _)| *gid).take(GROUPS_MAX).collect();
    groups.retain(|other| *other != gid);
    Ok(User {
        name,
        uid,
        gid,
        groups,
        home,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_found_and_unknown_names_are_not() {
        let passwd = "root:x:0:0:r:/root:/bin/sh\nbroken\nann:x:1000:100:A:/home/ann:/bin/sh\n";
        let group = "users:x:100:\nwheel:x:10:bob,ann\n";
        let user = |wanted: &str| find_in(wanted, passwd, group);
        let ann = user("ann").unwrap();
        assert_eq!((ann.uid, ann.gid, &*ann.home), (1000, 100, "/home/ann"));
        assert_eq!(ann.groups, [10]);
        assert_eq!(user("1000").unwrap(), ann);
        assert_eq!(user("ann:wheel").unwrap().gid, 10);
        assert_eq!(user("").unwrap().uid, 0);
        let number = user("77:88").unwrap();
        assert_eq!((number.uid, number.gid, &*number.home), (77, 88, "/"));
        assert!(user("nobody-here").is_err());
        assert!(user("ann:none").is_err());
        assert_eq!(find_in("", "", "").unwrap().home, "/root");
        assert_eq!(named(passwd, 1000).as_deref(), Some("ann"));
        assert_eq!(named(group, 10).as_deref(), Some("wheel"));
        assert_eq!(named(passwd, 7), None);
    }
}
