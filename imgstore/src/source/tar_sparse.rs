//! Sparse files in tars: GNU's old type `S`, and PAX sparse 0.0, 0.1 and 1.0. All become checked runs.

use super::SourceError;
use super::error::TarFault;
use super::pax::{PaxRecords, decimal};
use super::tar_header::{BLOCK, GNU_REAL_SIZE, Header, gnu_sparse_block};
use super::tar_input::TarInput;
use crate::ids::to_u64;
use crate::tree::DataRun;

/// A sparse file's map: pairs of offset and length, and the size of the file.
#[derive(Debug)]
pub(super) struct SparseMap {
    pub(super) pairs: Vec<(u64, u64)>,
    pub(super) real_size: u64,
    /// Bytes of data that follow in the archive.
    pub(super) stored: u64,
}

impl SparseMap {
    /// Checks the map and turns it into runs that start at `stored_offset` in the place of the data.
    pub(super) fn runs(&self, stored_offset: u64) -> Result<Vec<DataRun>, TarFault> {
        let mut runs: Vec<DataRun> = Vec::new();
        let (mut end, mut stored) = (0_u64, 0_u64);
        for (offset, len) in &self.pairs {
            let next = offset
                .checked_add(*len)
                .filter(|next| *offset >= end && *next <= self.real_size)
                .ok_or(TarFault::Sparse("expected rising pieces inside the file"))?;
            if *len > 0 {
                runs.push(DataRun {
                    file_offset: *offset,
                    len: *len,
                    stored_offset: stored_offset
                        .checked_add(stored)
                        .ok_or(TarFault::Sparse("expected offsets below 2^64"))?,
                });
            }
            stored += len;
            end = next;
        }
        if stored == self.stored {
            Ok(runs)
        } else {
            Err(TarFault::Sparse(
                "expected pieces that add up to the stored bytes",
            ))
        }
    }
}

/// The map of a type `S` entry; reads the map blocks that follow its header.
pub(super) fn gnu_map(
    header: &Header,
    stored: u64,
    input: &mut TarInput<'_>,
    start: u64,
) -> Result<SparseMap, SourceError> {
    let (mut pairs, mut more) = header.gnu_sparse().map_err(|f| input.fault(start, f))?;
    while more {
        let block = input.block()?.ok_or_else(|| {
            let fault = TarFault::Sparse("expected another map block");
            input.fault(start, fault)
        })?;
        let (next, again) = gnu_sparse_block(&block).map_err(|f| input.fault(start, f))?;
        pairs.extend(next);
        more = again;
    }
    let real_size = header
        .unsigned(GNU_REAL_SIZE)
        .map_err(|f| input.fault(start, f))?;
    Ok(SparseMap {
        pairs,
        real_size,
        stored,
    })
}

/// The map of a PAX sparse file, `None` when the records speak of none. Version 1.0 reads it from the data.
pub(super) fn pax_map(
    records: &PaxRecords,
    size: u64,
    input: &mut TarInput<'_>,
    start: u64,
) -> Result<Option<SparseMap>, SourceError> {
    let at = |input: &TarInput<'_>, fault| input.fault(start, fault);
    let number = |input: &TarInput<'_>, key| records.number(key).map_err(|f| at(input, f));
    if let Some(major) = number(input, "GNU.sparse.major")? {
        let minor = number(input, "GNU.sparse.minor")?;
        let real_size = number(input, "GNU.sparse.realsize")?;
        let (1, Some(0), Some(real_size)) = (major, minor, real_size) else {
            return Err(at(
                input,
                TarFault::Sparse("expected version 1.0 and a real size"),
            ));
        };
        return map_in_data(real_size, size, input, start).map(Some);
    }
    let Some(real_size) = number(input, "GNU.sparse.size")? else {
        return Ok(None);
    };
    let pairs = match records.text("GNU.sparse.map") {
        Some(text) => map_in_record(text).map_err(|f| at(input, f))?,
        None => records.sparse_pairs().to_vec(),
    };
    Ok(Some(SparseMap {
        pairs,
        real_size,
        stored: size,
    }))
}

fn map_in_record(text: &[u8]) -> Result<Vec<(u64, u64)>, TarFault> {
    let numbers: Vec<u64> = text
        .split(|b| *b == b',')
        .map(|number| decimal(b"GNU.sparse.map", number))
        .collect::<Result<_, _>>()?;
    let (pairs, rest) = numbers.as_chunks::<2>();
    if rest.is_empty() {
        Ok(pairs.iter().map(|[offset, len]| (*offset, *len)).collect())
    } else {
        Err(TarFault::Sparse("expected pairs of numbers"))
    }
}

/// Version 1.0: decimal lines (count, then offset and length of each piece), padded to a block.
fn map_in_data(
    real_size: u64,
    size: u64,
    input: &mut TarInput<'_>,
    start: u64,
) -> Result<SparseMap, SourceError> {
    let mut text = Vec::new();
    let mut numbers: Vec<u64> = Vec::new();
    let mut stored = size;
    loop {
        let fail = |input: &TarInput<'_>, what| input.fault(start, TarFault::Sparse(what));
        stored = stored
            .checked_sub(to_u64(BLOCK))
            .ok_or_else(|| fail(input, "expected the whole map inside the data"))?;
        let block = input
            .block()?
            .ok_or_else(|| fail(input, "expected the whole map inside the archive"))?;
        text.extend_from_slice(&block);
        while let Some(at) = text.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = text.drain(..=at).collect();
            let digits = line.strip_suffix(b"\n").unwrap_or_default();
            numbers.push(decimal(b"sparse map", digits).map_err(|f| input.fault(start, f))?);
            if is_whole(&numbers) {
                break;
            }
        }
        if is_whole(&numbers) {
            break;
        }
        // No number is that long; without a bound the search for its end would start over with every block.
        if text.len() > BLOCK {
            return Err(fail(input, "expected a number on every line"));
        }
    }
    let (pairs, _) = numbers.get(1..).unwrap_or_default().as_chunks::<2>();
    Ok(SparseMap {
        pairs: pairs.iter().map(|[offset, len]| (*offset, *len)).collect(),
        real_size,
        stored,
    })
}

fn is_whole(numbers: &[u64]) -> bool {
    numbers
        .first()
        .and_then(|count| count.checked_mul(2))
        .is_some_and(|count| to_u64(numbers.len() - 1) >= count)
}
