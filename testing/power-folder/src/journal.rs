//! Events, and what is left of them.

use std::collections::HashMap;
use std::path::Path;

const SECTOR: usize = 512;

/// Something that happened to a file or a folder, by its number; 1 is the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A name for a file or folder, new or another one.
    Name {
        /// Where.
        folder: u64,
        /// The name.
        name: String,
        /// What it names.
        file: u64,
    },
    /// A name goes.
    Unname {
        /// Where.
        folder: u64,
        /// The name.
        name: String,
    },
    /// A name in a folder takes another's place, in one step.
    Rename {
        /// Where.
        folder: u64,
        /// The name.
        from: String,
        /// Its new one.
        to: String,
    },
    /// Bytes.
    Write {
        /// Of which file.
        file: u64,
        /// Where.
        offset: usize,
        /// What.
        bytes: Vec<u8>,
    },
    /// Another length.
    Cut {
        /// Of which file.
        file: u64,
        /// Bytes.
        len: usize,
    },
    /// A file or a folder was synced.
    Sync(u64),
}

impl Event {
    fn is_name(&self) -> bool {
        matches!(
            self,
            Self::Name { .. } | Self::Unname { .. } | Self::Rename { .. }
        )
    }

    /// The file or folder whose sync makes it last.
    fn of(&self) -> u64 {
        match self {
            Self::Name { folder, .. }
            | Self::Unname { folder, .. }
            | Self::Rename { folder, .. } => *folder,
            Self::Write { file, .. } | Self::Cut { file, .. } | Self::Sync(file) => *file,
        }
    }
}

#[derive(Debug, Default)]
struct Found {
    names: HashMap<u64, HashMap<String, u64>>,
    bytes: HashMap<u64, Vec<u8>>,
}

impl Found {
    /// `sector` says of each sector of a write whether it is there.
    fn apply(&mut self, event: &Event, sector: &mut dyn FnMut() -> bool) {
        match event {
            Event::Name { folder, name, file } => {
                let names = self.names.entry(*folder).or_default();
                names.insert(name.clone(), *file);
            }
            Event::Unname { folder, name } => {
                self.names.entry(*folder).or_default().remove(name);
            }
            Event::Rename { folder, from, to } => {
                let names = self.names.entry(*folder).or_default();
                // Its name may never have reached the disk.
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                }
            }
            Event::Write {
                file,
                offset,
                bytes,
            } => {
                let content = self.bytes.entry(*file).or_default();
                for (number, part) in bytes.chunks(SECTOR).enumerate() {
                    if !sector() {
                        continue;
                    }
                    let at = offset + number * SECTOR;
                    if content.len() < at + part.len() {
                        content.resize(at + part.len(), 0);
                    }
                    content[at..at + part.len()].copy_from_slice(part);
                }
            }
            Event::Cut { file, len } => self.bytes.entry(*file).or_default().resize(*len, 0),
            Event::Sync(_) => {}
        }
    }

    fn save(&self, folder: u64, kinds: &HashMap<u64, bool>, into: &Path) {
        for (name, file) in self.names.get(&folder).into_iter().flatten() {
            let path = into.join(name);
            if kinds[file] {
                std::fs::create_dir(&path).unwrap();
                self.save(*file, kinds, &path);
            } else {
                let bytes = self.bytes.get(file).cloned().unwrap_or_default();
                std::fs::write(path, bytes).unwrap();
            }
        }
    }
}

/// What is left of `events`, put into a folder.
pub(crate) fn after(events: &[Event], random: &mut dyn FnMut(u64) -> u64, into: &Path) {
    let mut synced: HashMap<u64, usize> = HashMap::new();
    let mut folders: HashMap<u64, bool> = HashMap::new();
    for (number, event) in events.iter().enumerate() {
        match event {
            Event::Sync(file) => drop(synced.insert(*file, number)),
            Event::Name { file, .. } => drop(folders.insert(*file, file % 2 == 1)),
            _ => {}
        }
    }
    // Journals keep the order of names; what has none may not, and may even have the last change alone.
    let (in_order, last_alone) = match random(3) {
        0 => (true, false),
        1 => (false, true),
        _ => (false, false),
    };
    let mut last: HashMap<u64, usize> = HashMap::new();
    for (number, event) in events.iter().enumerate().filter(|(_, e)| e.is_name()) {
        last.insert(event.of(), number);
    }
    let mut ended: HashMap<u64, bool> = HashMap::new();
    let mut found = Found::default();
    for (number, event) in events.iter().enumerate() {
        if synced.get(&event.of()).is_some_and(|last| number <= *last) {
            found.apply(event, &mut || true);
            continue;
        }
        let is_name = event.is_name();
        if is_name && last_alone {
            if last[&event.of()] == number {
                found.apply(event, &mut || true);
            }
            continue;
        }
        let ended = ended.entry(event.of()).or_default();
        let fate = random(4);
        *ended |= is_name && in_order && fate == 0;
        if fate == 0 || is_name && *ended {
            continue;
        }
        let torn = fate == 1;
        found.apply(event, &mut || !torn || random(2) == 0);
    }
    found.save(1, &folders, into);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(events: &[Event]) -> Vec<String> {
        let mut seed = 1_u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..200 {
            let folder =
                std::env::temp_dir().join(format!("power-{}-{number}", std::process::id()));
            std::fs::create_dir(&folder).unwrap();
            after(events, &mut random, &folder);
            let mut all: Vec<String> = std::fs::read_dir(&folder)
                .unwrap()
                .map(|entry| {
                    let path = entry.unwrap().path();
                    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                    name + "=" + &String::from_utf8(std::fs::read(path).unwrap()).unwrap()
                })
                .collect();
            all.sort();
            seen.insert(all.join(" "));
            std::fs::remove_dir_all(folder).unwrap();
        }
        seen.into_iter().collect()
    }

    /// A file that is synced and has no synced name may be missing; its bytes, where it is found, are there.
    #[test]
    fn what_was_synced_stays_and_the_rest_is_up_to_chance() {
        let name = |name: &str, file| Event::Name {
            folder: 1,
            name: name.to_owned(),
            file,
        };
        let write = |file, text: &str| Event::Write {
            file,
            offset: 0,
            bytes: text.as_bytes().to_vec(),
        };
        let mut events = vec![name("a", 2), write(2, "x"), Event::Sync(2)];
        assert_eq!(outcomes(&events), ["", "a=x"]);
        events.extend([Event::Sync(1), write(2, "y")]);
        assert_eq!(outcomes(&events), ["a=x", "a=y"]);
        events.truncate(4);
        events.extend([name("b", 4), write(4, "z"), Event::Sync(4)]);
        events.push(Event::Rename {
            folder: 1,
            from: "b".to_owned(),
            to: "a".to_owned(),
        });
        assert_eq!(outcomes(&events), ["a=x", "a=x b=z", "a=z"]);
    }
}
