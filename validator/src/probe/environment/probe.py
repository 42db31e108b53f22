# Proves one framework in one Python environment: import, devices, verified computations.
# Runs under CPython 3.6 and newer, from standard input: python -B -u - FD FRAMEWORK SIZE LIMIT
# Each line on FD is one JSON object: {"begin": STEP} before and {"end": STEP, ...} after a step.
import faulthandler
import json
import os
import sys
import time

FD, FRAMEWORK, SIZE, LIMIT = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


class Skip(Exception):
    pass


def send(value):
    line = (json.dumps(value) + "\n").encode("utf-8", "replace")
    while line:
        line = line[os.write(FD, line):]


def describe(error):
    import traceback

    lines = traceback.format_exception_only(type(error), error)
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-2:])
    return ("".join(lines).strip() + "\n" + "".join(frames).rstrip())[:4000]


def step(name, work):
    send({"begin": name})
    begin = time.time()
    result = {"end": name}
    try:
        result["results"] = work() or {}
        good = True
    except Skip as reason:
        result["skipped"] = str(reason)
        good = True
    except SystemExit as error:
        result["error"] = "SystemExit: %s" % error
        good = False
    except BaseException as error:
        result["error"] = describe(error)
        good = False
    result["seconds"] = time.time() - begin
    send(result)
    return good


def start():
    return {
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "prefix": sys.prefix,
    }


def libraries():
    """Paths of the GPU libraries that this process has mapped."""
    names = ("cuda", "cublas", "cudnn", "nccl", "nvrtc", "nvJitLink", "libstdc++")
    found = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            base = path.rsplit("/", 1)[-1]
            if ".so" in base and base.startswith("lib") and any(name in base for name in names):
                found["/" + path] = base
    return {"mapped": sorted(found)}


# Integers whose products and sums are exact in FP32, TF32 and BF16 with FP32 sums: rows and columns repeat with
# different periods, so that an exchanged index changes the result.
def left(row, column):
    return (row * 3 + column * 5) % 7 - 3


def right(row, column):
    return (row * 2 + column * 3) % 5 - 2


class Torch(object):
    def import_(self):
        import torch

        self.torch = torch
        return {"version": torch.__version__, "file": torch.__file__}

    def build(self):
        torch = self.torch
        results = {"cuda": torch.version.cuda}
        try:
            results["architectures"] = list(torch.cuda.get_arch_list())
        except Exception as error:
            results["architectures_error"] = str(error)
        try:
            results["cudnn"] = torch.backends.cudnn.version()
        except Exception as error:
            results["cudnn_error"] = str(error)
        try:
            results["nccl"] = list(torch.cuda.nccl.version())
        except Exception as error:
            results["nccl_error"] = str(error)
        return results

    def devices(self):
        torch = self.torch
        available = bool(torch.cuda.is_available())
        devices = []
        if not available:
            # is_available() hides the reason, and init() raises it.
            torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            uuid = getattr(properties, "uuid", None)
            devices.append({
                "uuid": "" if uuid is None else str(uuid),
                "name": properties.name,
                "capability": "%d.%d" % (properties.major, properties.minor),
                "memory_mib": properties.total_memory >> 20,
            })
        self.count = len(devices)
        return {"available": available, "devices": devices}

    def each(self, work):
        for index in range(self.count):
            work("cuda:%d" % index)
            self.torch.cuda.synchronize(index)
        return {"devices": self.count}

    def roundtrip(self):
        torch = self.torch

        def work(device):
            moved = torch.tensor([1.0, 2.0]).to(device) + torch.tensor([3.0, 4.0]).to(device)
            found = moved.cpu().tolist()
            if found != [4.0, 6.0]:
                raise AssertionError("[1, 2] + [3, 4] on %s is %r" % (device, found))

        return self.each(work)

    def operands(self):
        torch = self.torch
        rows = torch.arange(SIZE).reshape(SIZE, 1)
        columns = torch.arange(SIZE).reshape(1, SIZE)
        return (
            ((rows * 3 + columns * 5) % 7 - 3).to(torch.float32),
            ((rows * 2 + columns * 3) % 5 - 2).to(torch.float32),
        )

    def gemm(self, kind):
        torch = self.torch
        one, other = self.operands()
        expected = torch.matmul(one, other)

        def work(device):
            product = torch.matmul(one.to(device).to(kind), other.to(device).to(kind)).to(torch.float32).cpu()
            # The same rounding as the result's, which is exact before it.
            wrong = int((product != expected.to(kind).to(torch.float32)).sum())
            if wrong:
                raise AssertionError("%d of %d elements of the product on %s are wrong" % (wrong, SIZE * SIZE, device))

        results = self.each(work)
        results["size"] = SIZE
        return results

    def gemm_fp32(self):
        return self.gemm(self.torch.float32)

    def gemm_bf16(self):
        torch = self.torch
        for index in range(self.count):
            if torch.cuda.get_device_capability(index)[0] < 8:
                raise Skip("BF16 needs compute capability 8.0")
        return self.gemm(torch.bfloat16)

    def autograd(self):
        torch = self.torch

        def work(device):
            weight = torch.tensor([2.0, -3.0], device=device, requires_grad=True)
            (weight * weight).sum().backward()
            found = weight.grad.cpu().tolist()
            if found != [4.0, -6.0]:
                raise AssertionError("the gradient of x * x at [2, -3] on %s is %r" % (device, found))

        return self.each(work)

    steps = ("devices", "roundtrip", "gemm_fp32", "gemm_bf16", "autograd")


class Jax(object):
    def import_(self):
        import jax

        self.jax = jax
        return {"version": jax.__version__, "file": jax.__file__}

    def build(self):
        import jaxlib

        return {"jaxlib": jaxlib.__version__}

    def devices(self):
        found = self.jax.devices("gpu")
        self.found = found
        devices = [{"uuid": "", "name": str(it.device_kind)} for it in found]
        return {"available": bool(found), "devices": devices}

    def roundtrip(self):
        numpy = self.jax.numpy
        for device in self.found:
            one = self.jax.device_put(numpy.array([1.0, 2.0]), device)
            found = [float(it) for it in one + self.jax.device_put(numpy.array([3.0, 4.0]), device)]
            if found != [4.0, 6.0]:
                raise AssertionError("[1, 2] + [3, 4] on %s is %r" % (device, found))

    def gemm_fp32(self):
        import numpy

        one, other = numpy_operands(numpy)
        expected = numpy.matmul(one, other)
        for device in self.found:
            product = self.jax.numpy.matmul(self.jax.device_put(one, device), self.jax.device_put(other, device))
            compare(numpy, numpy.asarray(product), expected, device)
        return {"size": SIZE}

    def autograd(self):
        found = float(self.jax.grad(lambda it: it * it)(-3.0))
        if found != -6.0:
            raise AssertionError("the gradient of x * x at -3 is %r" % found)

    steps = ("devices", "roundtrip", "gemm_fp32", "autograd")


class Tensorflow(object):
    def import_(self):
        import tensorflow

        self.tf = tensorflow
        return {"version": tensorflow.__version__, "file": tensorflow.__file__}

    def build(self):
        info = self.tf.sysconfig.get_build_info()
        return {"cuda": str(info.get("cuda_version")), "cudnn": str(info.get("cudnn_version"))}

    def devices(self):
        found = self.tf.config.list_physical_devices("GPU")
        self.count = len(found)
        return {"available": bool(found), "devices": [{"uuid": "", "name": it.name} for it in found]}

    def gemm_fp32(self):
        import numpy

        one, other = numpy_operands(numpy)
        expected = numpy.matmul(one, other)
        for index in range(self.count):
            device = "/GPU:%d" % index
            with self.tf.device(device):
                product = self.tf.matmul(self.tf.constant(one), self.tf.constant(other)).numpy()
            compare(numpy, product, expected, device)
        return {"size": SIZE}

    def autograd(self):
        value = self.tf.Variable(-3.0)
        with self.tf.GradientTape() as tape:
            square = value * value
        found = float(tape.gradient(square, value))
        if found != -6.0:
            raise AssertionError("the gradient of x * x at -3 is %r" % found)

    steps = ("devices", "gemm_fp32", "autograd")


class Cupy(object):
    def import_(self):
        import cupy

        self.cupy = cupy
        return {"version": cupy.__version__, "file": cupy.__file__}

    def build(self):
        runtime = self.cupy.cuda.runtime
        return {"cuda": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}

    def devices(self):
        runtime = self.cupy.cuda.runtime
        self.count = runtime.getDeviceCount()
        devices = []
        for index in range(self.count):
            properties = runtime.getDeviceProperties(index)
            name, uuid = properties["name"], properties.get("uuid", b"")
            if isinstance(name, bytes):
                name = name.decode("utf-8", "replace")
            text = "".join("%02x" % it for it in bytearray(uuid)) if isinstance(uuid, bytes) else ""
            if len(text) == 32:
                text = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
            devices.append({"uuid": text, "name": name})
        return {"available": self.count > 0, "devices": devices}

    def gemm_fp32(self):
        import numpy

        one, other = numpy_operands(numpy)
        expected = numpy.matmul(one, other)
        for index in range(self.count):
            with self.cupy.cuda.Device(index):
                product = self.cupy.asnumpy(self.cupy.matmul(self.cupy.asarray(one), self.cupy.asarray(other)))
            compare(numpy, product, expected, "GPU %d" % index)
        return {"size": SIZE}

    steps = ("devices", "gemm_fp32")


def numpy_operands(numpy):
    rows = numpy.arange(SIZE).reshape(SIZE, 1)
    columns = numpy.arange(SIZE).reshape(1, SIZE)
    return left(rows, columns).astype(numpy.float32), right(rows, columns).astype(numpy.float32)


def compare(numpy, product, expected, device):
    wrong = int(numpy.sum(product != expected))
    if wrong:
        raise AssertionError("%d of %d elements of the product on %s are wrong" % (wrong, SIZE * SIZE, device))


def main():
    faulthandler.enable()
    # Just before the parent's limit, so that the output holds where it hangs.
    faulthandler.dump_traceback_later(LIMIT, exit=False)
    if not step("start", start):
        return
    kinds = {"torch": Torch, "jax": Jax, "tensorflow": Tensorflow, "cupy": Cupy}
    if FRAMEWORK not in kinds:
        return
    proof = kinds[FRAMEWORK]()
    if not step("import", proof.import_):
        return
    step("build", proof.build)
    for name in proof.steps:
        if not step(name, getattr(proof, name)) and name == "devices":
            break
    step("libraries", libraries)


main()
sys.stdout.flush()
sys.stderr.flush()
# Hooks at the exit of a framework may hang.
os._exit(0)
