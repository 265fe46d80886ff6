//! Loop devices: two requests of linux/loop.h.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use nix::libc;

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
/// The device is free again as soon as nothing has it open: nobody has to clean up.
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// `struct loop_config`, whose `struct loop_info64` is flags and nothing else here.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// Device, inode, device again, offset, size.
    places: [u64; 5],
    /// Number, encryption kind, key size.
    numbers: [u32; 3],
    flags: u32,
    names: [u8; 64 + 64 + 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

/// The number of a device that is free now.
///
/// # Errors
/// What the kernel says.
pub(crate) fn free(control: &File) -> io::Result<u32> {
    // SAFETY: this request takes no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    u32::try_from(number).map_err(|_negative| io::Error::last_os_error())
}

/// Makes a device show a file.
///
/// # Errors
/// `EBUSY` when somebody else took it meanwhile; what the kernel says.
pub(crate) fn configure(device: &File, file: &File) -> io::Result<()> {
    let config = LoopConfig {
        fd: file.as_raw_fd().cast_unsigned(),
        block_size: 4096,
        places: [0; 5],
        numbers: [0; 3],
        flags: LO_FLAGS_AUTOCLEAR,
        names: [0; 160],
        init: [0; 2],
        reserved: [0; 8],
    };
    // SAFETY: `config` is a whole `loop_config` that lives until the call returns; the kernel keeps its own reference to the file.
    let done = unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            LOOP_CONFIGURE,
            std::ptr::from_ref(&config),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_kernels() {
        assert_eq!(size_of::<LoopConfig>(), 304);
        assert_eq!(std::mem::offset_of!(LoopConfig, flags), 8 + 52);
        assert_eq!(std::mem::offset_of!(LoopConfig, reserved), 8 + 232);
    }
}
