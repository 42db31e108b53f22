"""A small stand-in for torch that uses the CUDA driver through ctypes: names and answers are those of torch 2.8.

Products are computed on the CPU from what was read back from device memory. A file `_fault.txt` in the package's
folder names a fault.
"""
import array
import ctypes
import os
import sys

from . import version
from .version import __version__

_FAULT_FILE = os.path.join(os.path.dirname(__file__), "_fault.txt")
_FAULT = open(_FAULT_FILE).read().strip() if os.path.exists(_FAULT_FILE) else ""

if _FAULT == "import error":
    raise ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory")
if _FAULT == "undefined symbol":
    raise ImportError("libtorch_cuda.so: undefined symbol: ncclCommWindowRegister")
if _FAULT == "glibcxx":
    raise ImportError("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by libtorch_cuda.so)")
if _FAULT == "segfault":
    ctypes.string_at(0)
if _FAULT == "abort":
    os.abort()
if _FAULT == "exit":
    sys.exit(3)
if _FAULT == "silent exit":
    os._exit(0)
if _FAULT == "hang":
    import time

    sys.stderr.write("loading libraries\n")
    time.sleep(3600)
if _FAULT == "memory":
    _held = []
    while True:
        _held.append(bytearray(b"x" * (8 << 20)))
if _FAULT == "prints":
    print('{"end": "import", "error": "this is on standard output"}')
    for _ in range(1000):
        print("welcome to this package, with a banner on standard output")


class dtype(object):
    def __init__(self, name):
        self.name = name


float32 = dtype("float32")
bfloat16 = dtype("bfloat16")


class _Driver(object):
    """libcuda.so.1; every call is checked."""

    def __init__(self):
        if _FAULT == "driver too old":
            raise RuntimeError(
                "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver")
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")
        code = self.library.cuInit(0)
        if code:
            raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error %d: %s" % (code, _ERRORS.get(code, "")))
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.count = count.value
        if not self.count:
            raise RuntimeError("No CUDA GPUs are available")
        self.contexts = {}

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError("CUDA error: %d in %s" % (code, name))

    def device(self, index):
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        return device

    def use(self, index):
        if index not in self.contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device(index))
            self.contexts[index] = context
        self.call("cuCtxSetCurrent", self.contexts[index])


_ERRORS = {
    803: "system has unsupported display driver / cuda driver combination",
    804: "forward compatibility was attempted on non supported HW",
    802: "system not yet initialized",
}
_driver = []


def _cuda():
    if version.cuda is None:
        raise AssertionError("Torch not compiled with CUDA enabled")
    if not _driver:
        _driver.append(_Driver())
    return _driver[0]


def _round(value, kind):
    if kind is not bfloat16:
        return value
    # Round to nearest even at 8 bits of mantissa.
    bits = ctypes.c_uint32.from_buffer_copy(ctypes.c_float(value)).value
    bits += 0x7fff + ((bits >> 16) & 1)
    return ctypes.c_float.from_buffer_copy(ctypes.c_uint32(bits & 0xffff0000)).value


class Tensor(object):
    def __init__(self, data, shape, device="cpu", kind=float32, requires_grad=False):
        self.data, self.shape, self.device, self.dtype = data, shape, device, kind
        self.requires_grad, self.grad, self._backward = requires_grad, None, None

    def _like(self, data):
        return Tensor(data, self.shape, self.device, self.dtype)

    def reshape(self, *shape):
        return Tensor(self.data, shape, self.device, self.dtype)

    def _pair(self, other, work):
        if not isinstance(other, Tensor):
            return self._like([work(it, other) for it in self.data])
        if self.shape == other.shape:
            return self._like([work(a, b) for a, b in zip(self.data, other.data)])
        # A column and a row.
        data = [work(a, b) for a in self.data for b in other.data]
        return Tensor(data, (self.shape[0], other.shape[1]), self.device, self.dtype)

    def __add__(self, other):
        return self._pair(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._pair(other, lambda a, b: a - b)

    def __mod__(self, other):
        return self._pair(other, lambda a, b: a % b)

    def __ne__(self, other):
        return self._pair(other, lambda a, b: a != b)

    def __mul__(self, other):
        product = self._pair(other, lambda a, b: a * b)
        if self.requires_grad and other is self:
            def backward():
                self.grad = self._like([2 * it for it in self.data])
            product._backward = backward
        return product

    def sum(self):
        total = Tensor([sum(self.data)], (), self.device, self.dtype)
        total._backward = self._backward
        return total

    def backward(self):
        self._backward()

    def __int__(self):
        return int(self.data[0])

    def tolist(self):
        return list(self.data)

    def cpu(self):
        return self.to("cpu")

    def to(self, where):
        if isinstance(where, dtype):
            data = self.data if where is self.dtype else [_round(float(it), where) for it in self.data]
            return Tensor(data, self.shape, self.device, where)
        data = self.data
        if where != "cpu":
            data = _through_device_memory(data, int(str(where).split(":")[-1]))
        return Tensor(data, self.shape, where, self.dtype)


def _through_device_memory(data, index):
    driver = _cuda()
    driver.use(index)
    host = array.array("f", data)
    size = ctypes.c_size_t(len(host) * 4)
    pointer = ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(pointer), size)
    address, _ = host.buffer_info()
    driver.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(address), size)
    back = array.array("f", bytes(len(host) * 4))
    address, _ = back.buffer_info()
    driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(address), pointer, size)
    driver.call("cuMemFree_v2", pointer)
    return back.tolist()


def tensor(data, device="cpu", requires_grad=False):
    return Tensor([float(it) for it in data], (len(data),), device, float32, requires_grad)


def arange(end):
    return Tensor(list(range(end)), (end,))


def matmul(one, other):
    if one.device != "cpu" and _FAULT == "no kernel image":
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    rows, inner = one.shape
    columns = other.shape[1]
    left = [tuple(one.data[row * inner:(row + 1) * inner]) for row in range(rows)]
    right = [tuple(other.data[column::columns]) for column in range(columns)]
    # Rows and columns repeat, and equal ones have equal products: each pair of kinds is computed once.
    of_rows, of_columns = {}, {}
    rows_by_kind = [of_rows.setdefault(it, len(of_rows)) for it in left]
    columns_by_kind = [of_columns.setdefault(it, len(of_columns)) for it in right]
    table = [[float(sum(x * y for x, y in zip(a, b))) for b in of_columns] for a in of_rows]
    data = []
    for row in rows_by_kind:
        products = table[row]
        data.extend([products[column] for column in columns_by_kind])
    if one.device != "cpu" and _FAULT == "wrong result":
        data[len(data) // 2] += 1.0
    return Tensor(data, (rows, columns), one.device, one.dtype).to(bfloat16 if one.dtype is bfloat16 else float32)


from . import backends, cuda  # noqa: E402
