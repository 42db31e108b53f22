"""A command as users give it to `gpu-validator allocation --layouts`: works every GPU that CUDA shows it, by libcuda through ctypes.

The first argument names what is wrong with it, the second a file for the process IDs of what it starts.
"""
import ctypes
import os
import signal
import subprocess
import sys
import time

FAULT = sys.argv[1]
# NVML is read every 0.2 s.
WORK_S = 1.5


def work():
    """Holds a context and memory on each visible GPU; returns how many these are."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError("%s returned %d" % (name, code))

    if cuda.cuInit(0):
        return 0
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    for ordinal in range(count.value):
        device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(8 << 20))
    if count.value:
        time.sleep(WORK_S)
    return count.value


def start_sleepers():
    """A child, and a grandchild in a session of its own that ignores SIGTERM."""
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sh -c \"trap '' TERM; echo \\$\\$ >> %s; while :; do sleep 1; done\" & echo $$ >> %s; wait" % (sys.argv[2], sys.argv[2])])
    deadline = time.time() + 10
    while time.time() < deadline:
        if os.path.exists(sys.argv[2]) and len(open(sys.argv[2]).read().split()) == 2:
            return child
        time.sleep(0.01)
    raise RuntimeError("the sleepers did not start")


if FAULT == "wrong GPU":
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
if FAULT == "hang":
    print("waiting for the other ranks", flush=True)
    start_sleepers()
    while True:
        time.sleep(1)
if FAULT == "leaves shared memory":
    open(sys.argv[2], "w").write("x")
if FAULT == "leaves processes":
    start_sleepers()
if FAULT == "signal":
    sys.stderr.write("about to read a null pointer\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
if FAULT == "out of memory":
    sys.stderr.write("Traceback (most recent call last):\n")
    sys.stderr.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    # What comes after it pushes it out of the end of the output that is kept.
    sys.stderr.write("noise\n" * 10000)
    sys.exit(1)
if FAULT == "out of host memory":
    open(sys.argv[2], "w").write("oom 1\noom_kill 1\n")
    os.kill(os.getpid(), signal.SIGKILL)
if FAULT == "silent":
    sys.exit(7)
if FAULT == "CPU":
    time.sleep(WORK_S)
    sys.exit(0)
if FAULT == "needs a GPU" and not work():
    sys.stderr.write("RuntimeError: No CUDA GPUs are available\n")
    sys.exit(1)
if FAULT == "prints control characters":
    sys.stdout.write("\x1b[31m\x00]]>&<\n" * 3)
    sys.exit(5)
if FAULT != "needs a GPU":
    used = work()
    print("used %d GPUs of %s" % (used, os.environ["CUDA_VISIBLE_DEVICES"]))
    if not used:
        print("No GPUs detected - falling back to CPU mode")
