"""`dsec sandbox shell` at a terminal of Python's. Usage: sandbox_shell.py DSEC ID; DSEC_URL says where the daemon is."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time

dsec, sandbox = sys.argv[1:]
until = time.monotonic() + 20


def resize(fd, rows, cols):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


pid, fd = pty.fork()
if pid == 0:
    resize(0, 31, 99)
    os.execv(dsec, [dsec, "sandbox", "shell", sandbox, "--cwd", "/w"])

seen = b""


def wait_for(what):
    """Reads until something is there, and forgets what came before."""
    global seen
    while what not in seen:
        if time.monotonic() > until:
            raise SystemExit(f"waited in vain for {what!r}: {seen!r}")
        if select.select([fd], [], [], 0.1)[0]:
            seen += os.read(fd, 65536)
    seen = seen.partition(what)[2]


# What is typed is echoed: so what is waited for is never in it.
os.write(fd, b"echo at $PWD-$(stat -c %a /dev/stdin -L | wc -l)-$((6*7))\r")
wait_for(b"at /w-1-42\r\n")
resize(fd, 12, 34)
os.kill(pid, signal.SIGWINCH)
# It arrives some time; and a shell that redraws its line may lose a key that is typed at that moment.
while b"cols=34\r\n" not in seen:
    if time.monotonic() > until:
        raise SystemExit(f"the size did not arrive: {seen!r}")
    os.write(fd, b"(:); echo cols''=$COLUMNS\r")
    wait_for(b"\r\n")
    if select.select([fd], [], [], 0.2)[0]:
        seen += os.read(fd, 65536)
wait_for(b"cols=34\r\n")
os.write(fd, b"(trap 'echo inter''rupted; exit' INT; echo wait''ing; sleep 1000)\r")
wait_for(b"waiting\r\n")
# Not us: the sandbox's program is interrupted.
os.write(fd, b"\x03")
wait_for(b"interrupted\r\n")
os.write(fd, b"exit 9\r")
while True:
    try:
        if not os.read(fd, 65536):
            break
    except OSError:
        break
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 9, status
