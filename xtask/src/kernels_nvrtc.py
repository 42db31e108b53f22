"""Compiles one CUDA C++ file to PTX with NVRTC: kernels_nvrtc.py LIBRARY SOURCE ARCHITECTURE OUTPUT"""

import ctypes
import pathlib
import sys

library, source, architecture, output = sys.argv[1:]
nvrtc = ctypes.CDLL(library)
program = ctypes.c_void_p()


def text(size_function, text_function):
    size = ctypes.c_size_t()
    getattr(nvrtc, size_function)(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, text_function)(program, buffer)
    return buffer.value


path = pathlib.Path(source)
# The name is the file's alone, so that no path of this machine reaches the PTX.
code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None)
if code != 0:
    sys.exit(f"nvrtcCreateProgram returned {code}")
options = [f"--gpu-architecture={architecture}", f"--include-path={path.parent}", "--std=c++17"]
array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
code = nvrtc.nvrtcCompileProgram(program, len(options), array)
log = text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode()
# The oldest architecture is wanted on purpose; every other warning counts as an error.
complaints = [line for line in log.splitlines() if line.strip() and "Architectures prior to" not in line]
if code != 0 or complaints:
    sys.exit("\n".join([f"{path.name}: NVRTC returned {code}"] + complaints))
pathlib.Path(output).write_bytes(text("nvrtcGetPTXSize", "nvrtcGetPTX"))
