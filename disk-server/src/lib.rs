//! Serves one disk: to the kernel through ublk, as a file through FUSE, or to a virtual machine over a socket.
