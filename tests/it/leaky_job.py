"""A job that leaves itself on the GPU with a gibibyte of its memory, until its input ends.

With "ignore" it does not hear SIGTERM, with "nobody" it goes on as another user, which takes root.
"""

import ctypes
import os
import signal
import sys

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        sys.exit(f"{name} answered {code}")


call("cuInit", 0)
context = ctypes.c_void_p()
call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
memory = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 30))
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "nobody" in sys.argv:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print("ready", os.getpid(), flush=True)
sys.stdin.read()
