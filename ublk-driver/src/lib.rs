//! Serves images to the kernel as block devices, `/dev/ublkbN`.
