//! The kernel's interface, written down: numbers, structures to and from bytes. Pure.
//!
//! After `include/uapi/linux/ublk_cmd.h` of Linux 6.12. Integers there are the machine's own; ours are little-endian, which is the
//! same on every machine this runs on.

#[cfg(target_endian = "big")]
compile_error!("the structures in this file are written for little-endian machines");

use crate::error::UblkError;

/// Bytes of a sector, the unit of positions and lengths.
pub(crate) const SECTOR: u64 = 512;
/// Most requests in flight in a queue.
pub(crate) const DEPTH_MAX: u16 = 4096;
/// Most queues of a device.
pub(crate) const QUEUES_MAX: u16 = 4096;
/// Bytes of [`IoDesc`].
pub(crate) const IO_DESC_BYTES: usize = 24;
/// A control command that is for no queue.
pub(crate) const NO_QUEUE: u16 = u16::MAX;

/// Features of the kernel's driver.
pub(crate) mod features {
    /// A dead server's device waits for another server.
    pub(crate) const USER_RECOVERY: u64 = 1 << 3;
    /// What the dead server had not answered is given to the next one.
    pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have the numbers of this file.
    pub(crate) const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// Bytes are copied by `pread` and `pwrite` on the device's character file, by any thread.
    pub(crate) const USER_COPY: u64 = 1 << 7;
}

const fn ioctl(direction: u32, number: u32, size: u32) -> u32 {
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}
const READ: u32 = 2;
const READ_WRITE: u32 = 3;
/// Bytes of a control command.
const CONTROL_BYTES: u32 = 32;
/// Bytes of a queue's command.
const IO_BYTES: u32 = 16;

/// A command to the control device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Command {
    /// For messages.
    pub(crate) name: &'static str,
    /// Its number.
    pub(crate) op: u32,
}

impl Command {
    pub(crate) const GET_DEV_INFO: Self = Self::new("get device", READ, 0x02);
    pub(crate) const ADD_DEV: Self = Self::new("add device", READ_WRITE, 0x04);
    pub(crate) const START_DEV: Self = Self::new("start device", READ_WRITE, 0x06);
    pub(crate) const STOP_DEV: Self = Self::new("stop device", READ_WRITE, 0x07);
    pub(crate) const SET_PARAMS: Self = Self::new("set parameters", READ_WRITE, 0x08);
    pub(crate) const GET_PARAMS: Self = Self::new("get parameters", READ, 0x09);
    pub(crate) const START_RECOVERY: Self = Self::new("start recovery", READ_WRITE, 0x10);
    pub(crate) const END_RECOVERY: Self = Self::new("end recovery", READ_WRITE, 0x11);
    pub(crate) const GET_FEATURES: Self = Self::new("get features", READ, 0x13);
    pub(crate) const DEL_DEV_ASYNC: Self = Self::new("delete device", READ, 0x14);

    const fn new(name: &'static str, direction: u32, number: u32) -> Self {
        Self {
            name,
            op: ioctl(direction, number, CONTROL_BYTES),
        }
    }
}

/// Asks for the first request of a tag.
pub(crate) const FETCH: u32 = ioctl(READ_WRITE, 0x20, IO_BYTES);
/// Answers a request and asks for the next one.
pub(crate) const COMMIT_AND_FETCH: u32 = ioctl(READ_WRITE, 0x21, IO_BYTES);
/// What a fetch returns when there is a request.
pub(crate) const RESULT_OK: i32 = 0;
/// What it returns when the device stops: `-ENODEV`.
pub(crate) const RESULT_ABORT: i32 = -19;

/// `struct ublksrv_ctrl_cmd` in the command area of a large submission entry. `address` is that of `len` bytes.
pub(crate) fn control(id: u32, len: u16, address: u64, data: u64) -> [u8; 80] {
    let mut out = [0; 80];
    let fields: [&[u8]; 5] = [
        &id.to_le_bytes(),
        &NO_QUEUE.to_le_bytes(),
        &len.to_le_bytes(),
        &address.to_le_bytes(),
        &data.to_le_bytes(),
    ];
    put(&mut out, &fields);
    out
}

/// `struct ublksrv_io_cmd`. The address is not used with [`features::USER_COPY`].
pub(crate) fn io_command(queue: u16, tag: u16, result: i32) -> [u8; 16] {
    let mut out = [0; 16];
    let fields: [&[u8]; 3] = [
        &queue.to_le_bytes(),
        &tag.to_le_bytes(),
        &result.to_le_bytes(),
    ];
    put(&mut out, &fields);
    out
}

fn put(out: &mut [u8], fields: &[&[u8]]) {
    let bytes = fields.iter().flat_map(|field| field.iter());
    for (to, from) in out.iter_mut().zip(bytes) {
        *to = *from;
    }
}

/// Takes integers out of bytes; zeros behind their end.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        put(&mut out, &[self.0]);
        self.0 = self.0.get(N..).unwrap_or_default();
        out
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DevInfo {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) state: u16,
    pub(crate) io_bytes_max: u32,
    pub(crate) id: u32,
    pub(crate) server_pid: i32,
    pub(crate) flags: u64,
    /// Kept by the kernel for the server: [`MAGIC`] and the owner.
    pub(crate) mark: u64,
}

/// Bytes of [`DevInfo`].
pub(crate) const DEV_INFO_BYTES: usize = 64;
/// "DSEC", in the upper half of [`DevInfo::mark`]: the device was made by this driver.
const MAGIC: u64 = 0x4453_4543_0000_0000;
const OWNER_MASK: u64 = 0xffff_ffff;

impl DevInfo {
    /// The mark of a device of `owner`.
    pub(crate) fn mark_of(owner: u32) -> u64 {
        MAGIC | u64::from(owner)
    }

    /// Whose device this is, if this driver made it.
    pub(crate) fn owner(&self) -> Option<u32> {
        let ours = self.mark & !OWNER_MASK == MAGIC;
        u32::try_from(self.mark & OWNER_MASK).ok().filter(|_| ours)
    }

    pub(crate) fn encode(&self) -> [u8; DEV_INFO_BYTES] {
        let mut out = [0; DEV_INFO_BYTES];
        let fields: [&[u8]; 10] = [
            &self.queues.to_le_bytes(),
            &self.depth.to_le_bytes(),
            &self.state.to_le_bytes(),
            &[0; 2],
            &self.io_bytes_max.to_le_bytes(),
            &self.id.to_le_bytes(),
            &self.server_pid.to_le_bytes(),
            &[0; 4],
            &self.flags.to_le_bytes(),
            &self.mark.to_le_bytes(),
        ];
        put(&mut out, &fields);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let mut r = Reader(bytes);
        let (queues, depth, state, _) = (r.u16(), r.u16(), r.u16(), r.u16());
        let (io_bytes_max, id) = (r.u32(), r.u32());
        let (server_pid, _) = (i32::from_le_bytes(r.take()), r.u32());
        Self {
            queues,
            depth,
            state,
            io_bytes_max,
            id,
            server_pid,
            flags: r.u64(),
            mark: r.u64(),
        }
    }
}

/// Attributes in [`Params`].
mod attributes {
    pub(super) const READ_ONLY: u32 = 1 << 0;
    pub(super) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(super) const FUA: u32 = 1 << 3;
}

/// `struct ublk_params`: what the block layer is told of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Params {
    pub(crate) read_only: bool,
    pub(crate) block_shift: u8,
    pub(crate) io_sectors_max: u32,
    pub(crate) sectors: u64,
}

/// Bytes of [`Params`]: head, basic and discard parameters.
pub(crate) const PARAMS_BYTES: usize = 60;
const TYPE_BASIC: u32 = 1 << 0;
const TYPE_DISCARD: u32 = 1 << 1;
/// Physical blocks and smallest efficient request: a page.
const PAGE_SHIFT: u8 = 12;
/// Most sectors of a discard or of zeros: 1 GiB, so that one of them does not take a worker for long.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;

impl Params {
    pub(crate) fn encode(&self) -> [u8; PARAMS_BYTES] {
        let mut out = [0; PARAMS_BYTES];
        let (attributes, types, discard_sectors) = if self.read_only {
            (attributes::READ_ONLY, TYPE_BASIC, 0)
        } else {
            let attributes = attributes::VOLATILE_CACHE | attributes::FUA;
            (attributes, TYPE_BASIC | TYPE_DISCARD, DISCARD_SECTORS_MAX)
        };
        let granularity = 1_u32 << self.block_shift;
        let len = u32::try_from(PARAMS_BYTES).unwrap_or_default();
        let fields: [&[u8]; 15] = [
            &len.to_le_bytes(),
            &types.to_le_bytes(),
            &attributes.to_le_bytes(),
            // Logical, physical, optimal, minimal.
            &[self.block_shift, PAGE_SHIFT, PAGE_SHIFT, PAGE_SHIFT],
            &self.io_sectors_max.to_le_bytes(),
            // No chunks.
            &[0; 4],
            &self.sectors.to_le_bytes(),
            // No boundary.
            &[0; 8],
            // Discard: alignment, granularity, sectors of a discard and of zeros, one range a request.
            &[0; 4],
            &granularity.to_le_bytes(),
            &discard_sectors.to_le_bytes(),
            &discard_sectors.to_le_bytes(),
            &1_u16.to_le_bytes(),
            &[0; 2],
            &[0; 0],
        ];
        put(&mut out, &fields);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let mut r = Reader(bytes);
        let (_len, _types, attributes) = (r.u32(), r.u32(), r.u32());
        let (block_shift, _, _, _) = (r.u8(), r.u8(), r.u8(), r.u8());
        let (io_sectors_max, _) = (r.u32(), r.u32());
        Self {
            read_only: attributes & attributes::READ_ONLY != 0,
            block_shift,
            io_sectors_max,
            sectors: r.u64(),
        }
    }
}

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Other(u8),
}

/// `struct ublksrv_io_desc`: a request, in memory shared with the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IoDesc {
    pub(crate) op: Op,
    /// What is written must survive a loss of power when it is answered.
    pub(crate) fua: bool,
    pub(crate) sectors: u32,
    pub(crate) start: u64,
}

const FUA_FLAG: u32 = 1 << 13;

impl IoDesc {
    pub(crate) fn decode(bytes: &[u8; IO_DESC_BYTES]) -> Self {
        let mut r = Reader(bytes);
        let word = r.u32();
        let [op, ..] = word.to_le_bytes();
        Self {
            op: match op {
                0 => Op::Read,
                1 => Op::Write,
                2 => Op::Flush,
                3 => Op::Discard,
                5 => Op::WriteZeroes,
                other => Op::Other(other),
            },
            fua: word & FUA_FLAG != 0,
            sectors: r.u32(),
            start: r.u64(),
        }
    }
}

/// Where the descriptions of a queue's requests are in the character file, and how many bytes they take.
pub(crate) fn descs_at(queue: u16, depth: u16) -> (u64, usize) {
    let stride = u64::from(DEPTH_MAX) * IO_DESC_BYTES as u64;
    (
        u64::from(queue) * stride,
        usize::from(depth) * IO_DESC_BYTES,
    )
}

/// Where the bytes of a request are in the character file.
pub(crate) fn bytes_at(queue: u16, tag: u16) -> u64 {
    const BASE: u64 = 0x8000_0000;
    BASE + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// Checks what the kernel would refuse without saying why.
///
/// # Errors
/// [`UblkError::Invalid`] that names the option.
pub(crate) fn check_shape(queues: u16, depth: u16, block_bytes: u32) -> Result<(), UblkError> {
    let wrong = |what: &str| Err(UblkError::Invalid(what.to_owned()));
    if queues == 0 || queues > QUEUES_MAX {
        return wrong("a device has 1 to 4096 queues");
    }
    if depth == 0 || depth > DEPTH_MAX {
        return wrong("a queue has 1 to 4096 requests in flight");
    }
    if !block_bytes.is_power_of_two() || !(512..=4096).contains(&block_bytes) {
        return wrong("a block has 512, 1024, 2048 or 4096 bytes");
    }
    Ok(())
}
