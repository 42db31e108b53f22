"""Runs COLUMNS ROWS PROGRAM [ARGUMENT...] with its output on a terminal of that size, and prints it."""

import fcntl
import os
import pty
import struct
import sys
import termios

columns, rows = int(sys.argv[1]), int(sys.argv[2])
program, terminal = pty.fork()
if program == 0:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    os.execv(sys.argv[3], sys.argv[3:])
output = b""
while True:
    try:
        chunk = os.read(terminal, 65536)
    except OSError:
        # The other side is closed.
        break
    if not chunk:
        break
    output += chunk
_, status = os.waitpid(program, 0)
sys.stdout.buffer.write(output.replace(b"\r\n", b"\n"))
sys.exit(os.waitstatus_to_exitcode(status))
