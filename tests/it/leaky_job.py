"""A job that leaves itself on the GPU with a gibibyte of its memory; with "ignore" it does not hear SIGTERM."""

import ctypes
import signal
import sys
import time

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
print("ready", flush=True)
time.sleep(120)
