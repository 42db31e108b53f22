"""Becomes the program that its arguments name, on a kernel that seems not to know Landlock: seccomp answers ENOSYS."""

import ctypes
import errno
import os
import struct
import sys

# From the kernel's headers: prctl.h, seccomp.h, and the numbers of landlock_create_ruleset to landlock_restrict_self, which
# are the same on every architecture.
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
FIRST, LAST = 444, 446
LOAD_SYSTEM_CALL, JUMP_IF_AT_LEAST, JUMP_IF_ABOVE, RETURN = 0x20, 0x35, 0x25, 0x06

FILTER = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in [
        (LOAD_SYSTEM_CALL, 0, 0, 0),
        (JUMP_IF_AT_LEAST, 0, 2, FIRST),
        (JUMP_IF_ABOVE, 1, 0, LAST),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.ENOSYS),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]
)


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(FILTER) // 8, FILTER)
for arguments in (
    (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
    (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)),
):
    if libc.prctl(*arguments) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if libc.syscall(FIRST, None, 0, 1) != -1 or ctypes.get_errno() != errno.ENOSYS:
    sys.exit("Landlock still answers")
os.execvp(sys.argv[1], sys.argv[1:])
