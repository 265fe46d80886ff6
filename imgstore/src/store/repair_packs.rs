//! The good frames of a repair, and the packs made of them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;

use tempfile::NamedTempFile;

use super::places::Places;
use super::repair::RepairError;
use super::runs::{self, Place, Sought, or_damaged};
use super::transfer::{self, StagedObject, Staging};
use super::verify::PackState;
use crate::build::BuildError;
use crate::build::publish::{self, Publisher};
use crate::build::segments::PackWriter;
use crate::format::names;
use crate::format::placement::Pack;
use crate::ids::{Digest, to_u64};
use crate::origin::{ByteRange, Created, Origin};

/// Verified frames in a temporary file.
#[derive(Debug)]
pub(super) struct Spool {
    file: NamedTempFile,
    end: u64,
    frames: HashMap<Digest, ByteRange>,
    /// Where the origin itself has them as well.
    here: HashMap<Digest, Place>,
    staging: Staging,
}

impl Spool {
    pub(super) fn new(staging: &Staging) -> Result<Self, RepairError> {
        Ok(Self {
            file: staging.file()?,
            end: 0,
            frames: HashMap::new(),
            here: HashMap::new(),
            staging: staging.clone(),
        })
    }

    pub(super) fn has(&self, segment: &Digest) -> bool {
        self.frames.contains_key(segment)
    }

    /// Reads what is not spooled yet from the places of `origin`, first choices first.
    pub(super) fn collect(
        &mut self,
        origin: &dyn Origin,
        needed: &[Sought],
        places: &Places,
        here: bool,
    ) -> Result<(), RepairError> {
        for choice in 0.. {
            let mut tried: Vec<Sought> = Vec::new();
            let mut seen = HashSet::new();
            for one in needed {
                let digest = one.segment.digest();
                let place = places.get(&digest).and_then(|places| places.get(choice));
                if let Some(place) = place
                    && !self.has(&digest)
                    && seen.insert(digest)
                {
                    tried.push(Sought {
                        place: *place,
                        ..*one
                    });
                }
            }
            if tried.is_empty() && places.values().all(|places| places.len() <= choice) {
                return Ok(());
            }
            runs::read::<RepairError>(origin, tried, &mut |one, frame| {
                let Ok(frame) = frame else { return Ok(()) };
                self.file
                    .write_all(&frame)
                    .map_err(|e| self.staging.error(e))?;
                let range = ByteRange {
                    start: self.end,
                    len: to_u64(frame.len()),
                };
                self.end += range.len;
                self.frames.insert(one.segment.digest(), range);
                if here {
                    self.here.insert(one.segment.digest(), one.place);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn frame(&self, segment: &Digest) -> Result<Option<Vec<u8>>, RepairError> {
        let Some(range) = self.frames.get(segment) else {
            return Ok(None);
        };
        let frame = transfer::read_staged(self.file.as_file(), *range);
        Ok(Some(frame.map_err(|e| self.staging.error(e))?))
    }
}

/// Makes packs right, or makes new ones.
pub(super) struct Mender<'a> {
    publisher: &'a Publisher<'a>,
    origin: &'a dyn Origin,
    from: Option<&'a dyn Origin>,
    staging: &'a Staging,
    spool: Spool,
    made: Made,
}

/// What was written.
#[derive(Debug, Default)]
pub(super) struct Made {
    /// Packs that have their bytes again.
    pub(super) rebuilt: Vec<String>,
    /// New packs.
    pub(super) written: Vec<String>,
    pub(super) packs_new: u64,
}

/// What came of putting good frames into a pack.
enum Patched {
    /// It is the pack again.
    Rebuilt(StagedObject),
    /// It was the pack all along.
    Right,
    /// It is something else.
    No,
}

impl<'a> Mender<'a> {
    pub(super) fn new(
        publisher: &'a Publisher<'a>,
        from: Option<&'a dyn Origin>,
        staging: &'a Staging,
        spool: Spool,
    ) -> Self {
        Self {
            publisher,
            origin: publisher.origin,
            from,
            staging,
            spool,
            made: Made::default(),
        }
    }

    pub(super) fn done(self) -> Made {
        self.made
    }

    /// Rebuilds a pack under its name; gives the bad places that are bad even so.
    pub(super) fn pack(&mut self, pack: Pack, bad: &[Sought]) -> Result<Vec<Sought>, RepairError> {
        let staged = match self.patched(&pack, bad)? {
            Patched::Rebuilt(staged) => Some(staged),
            // A placement points to a wrong place of it.
            Patched::Right => None,
            Patched::No => self.copied(&pack)?,
        };
        let Some(staged) = staged else {
            return Ok(bad.to_vec());
        };
        let object = names::pack(&pack.digest);
        let path = staged.file.path();
        if self
            .origin
            .create_from_file(&object, path)
            .map_err(RepairError::from)?
            == Created::Existed
        {
            self.origin.replace_from_file(&object, path)?;
        }
        self.made.rebuilt.push(object);
        let mut still = Vec::new();
        for one in bad {
            let end = one.place.range.start + one.place.range.len;
            let right = end <= staged.size && {
                let frame = transfer::read_staged(staged.file.as_file(), one.place.range)
                    .map_err(|e| self.staging.error(e))?;
                runs::check_frame(one.segment, &frame).is_ok()
            };
            if !right {
                still.push(*one);
            }
        }
        Ok(still)
    }

    /// The origin's own bytes with the good frames put in, if that is the pack.
    fn patched(&self, pack: &Pack, bad: &[Sought]) -> Result<Patched, RepairError> {
        let object = names::pack(&pack.digest);
        if or_damaged(self.origin.size(&object))? != Ok(pack.size) {
            return Ok(Patched::No);
        }
        let Ok(mut staged) = transfer::stage(self.origin, &object, pack.size, self.staging)? else {
            return Ok(Patched::No);
        };
        if staged.digest == pack.digest {
            return Ok(Patched::Right);
        }
        let fits = |one: &Sought| {
            let frame = self.spool.frames.get(&one.segment.digest());
            frame.is_some_and(|frame| frame.len == one.place.range.len)
        };
        if !bad.iter().all(fits) {
            return Ok(Patched::No);
        }
        for one in bad {
            let frame = self.spool.frame(&one.segment.digest())?.unwrap_or_default();
            let file = staged.file.as_file();
            file.write_all_at(&frame, one.place.range.start)
                .map_err(|e| self.staging.error(e))?;
        }
        staged.digest = hash(staged.file.as_file()).map_err(|e| self.staging.error(e))?;
        Ok(if staged.digest == pack.digest {
            Patched::Rebuilt(staged)
        } else {
            Patched::No
        })
    }

    /// The other origin's copy, if it is the pack.
    fn copied(&self, pack: &Pack) -> Result<Option<StagedObject>, RepairError> {
        let Some(from) = self.from else {
            return Ok(None);
        };
        let object = names::pack(&pack.digest);
        if or_damaged(from.size(&object))? != Ok(pack.size) {
            return Ok(None);
        }
        let staged = transfer::stage(from, &object, pack.size, self.staging)?;
        Ok(staged.ok().filter(|staged| staged.digest == pack.digest))
    }

    /// Finds or makes a new place for each of `homeless` whose frame is there.
    pub(super) fn new_homes(
        &mut self,
        homeless: &[Sought],
    ) -> Result<HashMap<(Digest, Place), Place>, RepairError> {
        let mut homes: HashMap<Digest, Place> = HashMap::new();
        let mut pending: Vec<(Digest, ByteRange)> = Vec::new();
        let mut writer = PackWriter::new(self.staging.folder(), self.origin.chunk_bytes());
        let mut seen = HashSet::new();
        for one in homeless {
            let digest = one.segment.digest();
            if !seen.insert(digest) {
                continue;
            }
            if let Some(place) = self.spool.here.get(&digest) {
                homes.insert(digest, *place);
            } else if let Some(frame) = self.spool.frame(&digest)? {
                pending.push((digest, writer.append(&frame, one.segment.len())?));
                self.put_finished(&mut writer, &mut pending, &mut homes)?;
            }
        }
        writer.finish()?;
        self.put_finished(&mut writer, &mut pending, &mut homes)?;
        self.confirm(&homes)?;
        let home = |one: &Sought| {
            let digest = one.segment.digest();
            Some(((digest, one.place), *homes.get(&digest)?))
        };
        Ok(homeless.iter().filter_map(home).collect())
    }

    /// Looks whether packs that are to be referred to stay: only a claim made before makes sure.
    fn confirm(&self, homes: &HashMap<Digest, Place>) -> Result<(), RepairError> {
        let packs: HashSet<Pack> = homes.values().map(|place| place.pack).collect();
        self.publisher
            .claim_objects(packs.iter().map(|pack| names::pack(&pack.digest)))?;
        let mut objects = Vec::new();
        for pack in packs {
            if PackState::of(self.origin, &pack)? != PackState::Sized {
                objects.push(names::pack(&pack.digest));
            }
        }
        if objects.is_empty() {
            return Ok(());
        }
        let origin = self.origin.address();
        Err(BuildError::Vanished { origin, objects }.into())
    }

    fn put_finished(
        &mut self,
        writer: &mut PackWriter,
        pending: &mut Vec<(Digest, ByteRange)>,
        homes: &mut HashMap<Digest, Place>,
    ) -> Result<(), RepairError> {
        for staged in writer.take_done() {
            self.publisher
                .claim_objects([names::pack(&staged.pack.digest)])?;
            publish::put_pack(self.origin, &staged)?;
            let pack = staged.pack;
            self.made.written.push(names::pack(&pack.digest));
            self.made.packs_new += 1;
            for (digest, range) in pending.drain(..) {
                homes.insert(digest, Place { pack, range });
            }
        }
        Ok(())
    }
}

fn hash(file: &File) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut buf = vec![0; 1 << 20];
    let mut reader = file.try_clone()?;
    io::Seek::rewind(&mut reader)?;
    loop {
        let n = reader.read(&mut buf)?;
        if n == 0 {
            return Ok(hasher.finalize().into());
        }
        hasher.update(buf.get(..n).unwrap_or_default());
    }
}
