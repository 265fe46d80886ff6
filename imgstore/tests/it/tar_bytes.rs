//! Tars written byte by byte, also ones no sane program writes.

/// An entry header with everything settable.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) kind: u8,
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) data: Vec<u8>,
    /// Fields overwritten at an offset after everything else, before the checksum.
    pub(crate) patches: Vec<(usize, Vec<u8>)>,
}

pub(crate) fn entry(kind: u8, name: &[u8], link: &[u8], data: &[u8]) -> Entry {
    Entry {
        kind,
        name: name.to_vec(),
        link: link.to_vec(),
        size: u64::try_from(data.len()).unwrap(),
        data: data.to_vec(),
        patches: Vec::new(),
    }
}

pub(crate) fn file(name: &str, data: &[u8]) -> Vec<u8> {
    entry(b'0', name.as_bytes(), b"", data).bytes()
}

pub(crate) fn dir(name: &str) -> Vec<u8> {
    entry(b'5', name.as_bytes(), b"", b"").bytes()
}

pub(crate) fn link(name: &str, target: &str) -> Vec<u8> {
    entry(b'1', name.as_bytes(), target.as_bytes(), b"").bytes()
}

pub(crate) fn symlink(name: &str, target: &str) -> Vec<u8> {
    entry(b'2', name.as_bytes(), target.as_bytes(), b"").bytes()
}

/// A PAX header with these records.
pub(crate) fn pax(records: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        let body = key.len() + value.len() + 3;
        let len = (body..).find(|n| body + n.to_string().len() == *n).unwrap();
        data.extend_from_slice(format!("{len} ").as_bytes());
        data.extend_from_slice(key);
        data.push(b'=');
        data.extend_from_slice(value);
        data.push(b'\n');
    }
    entry(b'x', b"pax", b"", &data).bytes()
}

/// Joins entries and adds the end blocks.
pub(crate) fn tar(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut all = entries.concat();
    all.extend_from_slice(&[0; 1024]);
    all
}

impl Entry {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut block = vec![0; 512];
        put(&mut block, 0, &self.name[..self.name.len().min(100)]);
        put(&mut block, 100, b"0000644\0");
        put(&mut block, 108, b"0000000\0");
        put(&mut block, 116, b"0000000\0");
        put(&mut block, 124, format!("{:011o}\0", self.size).as_bytes());
        put(&mut block, 136, b"00000000007\0");
        put(&mut block, 148, b"        ");
        block[156] = self.kind;
        put(&mut block, 157, &self.link[..self.link.len().min(100)]);
        put(&mut block, 257, b"ustar\x0000");
        for (at, bytes) in &self.patches {
            put(&mut block, *at, bytes);
        }
        let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
        put(&mut block, 148, format!("{sum:06o}\0 ").as_bytes());
        block.extend_from_slice(&self.data);
        block.resize(block.len().next_multiple_of(512), 0);
        block
    }
}

fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}
