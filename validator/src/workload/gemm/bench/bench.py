#!/usr/bin/env python3
"""Checks every kernel against independent references on a real GPU, then times it against cuBLASLt through PyTorch.

    bench.py KERNELS [check] [ptx] [vectors] [small] [time] [variants] [stress] [sustained]

KERNELS is the folder with the cubins and PTX that `cargo xtask kernels` made. ONLY=bf16,f64 and
FAMILIES=sm80,sm90a time these alone. Needs PyTorch, NumPy and nvidia-ml-py.
Every failed check prints a line that starts with FAIL and makes the exit code 1.
"""
import ctypes
import glob
import os
import random
import sys
import threading
import time

import numpy as np
import pynvml
import torch

CUDA = ctypes.CDLL("libcuda.so.1")
F64, F32, TF32, BF16, F16, E4M3, S8, S32 = range(8)
NAMES = {"f64": F64, "f32": F32, "tf32": TF32, "bf16": BF16, "f16": F16, "e4m3": E4M3, "s8": S8}
BYTES = {F64: 8, F32: 4, TF32: 4, BF16: 2, F16: 2, E4M3: 1, S8: 1}
TORCH = {F64: torch.float64, F32: torch.float32, TF32: torch.float32, BF16: torch.bfloat16, F16: torch.float16,
         E4M3: torch.float8_e4m3fn, S8: torch.int8}
EXACT, RANDOM, SIGN = range(3)
INTEGER, KIND_F32, KIND_F64 = range(3)
# Largest relative error (Frobenius) of random operands against FP64; E4M3 accumulates with about 14 bits on Hopper.
TOLERANCE = {F64: 1e-14, F32: 3e-6, TF32: 1e-5, BF16: 3e-6, F16: 3e-6, E4M3: 3e-3, S8: 0.0}
FAILURES = []


def fail(text):
    FAILURES.append(text)
    print("FAIL", text, flush=True)


def driver(code, what):
    if code != 0:
        text = ctypes.c_char_p()
        CUDA.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {code} {text.value}")


class Module:
    def __init__(self, path):
        self.handle = ctypes.c_void_p()
        data = open(path, "rb").read() + b"\0"
        driver(CUDA.cuModuleLoadData(ctypes.byref(self.handle), data), f"load {path}")
        self.functions = {}

    def function(self, name, shared=0):
        if name not in self.functions:
            handle = ctypes.c_void_p()
            driver(CUDA.cuModuleGetFunction(ctypes.byref(handle), self.handle, name.encode()), name)
            if shared:
                driver(CUDA.cuFuncSetAttribute(handle, 8, shared), "shared memory of " + name)
            self.functions[name] = handle
        return self.functions[name]


def launch(function, grid, block, arguments, shared=0):
    pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
    gx, gy = grid if isinstance(grid, tuple) else (grid, 1)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver(CUDA.cuLaunchKernel(function, gx, gy, 1, block, 1, 1, shared, stream, pointers, None), "launch")


def u32(value):
    return ctypes.c_uint32(value & 0xFFFFFFFF)


def u64(value):
    return ctypes.c_uint64(value)


def address(tensor):
    return ctypes.c_uint64(0 if tensor is None else tensor.data_ptr())


class TensorMap(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(pointer, rows, row_bytes, box_rows, keep=[]):
    # The driver wants the map aligned to 64 bytes.
    raw = (ctypes.c_uint8 * 256)()
    keep.append(raw)
    aligned = (ctypes.addressof(raw) + 63) & ~63
    dims = (ctypes.c_uint64 * 2)(row_bytes, rows)
    strides = (ctypes.c_uint64 * 1)(row_bytes)
    box = (ctypes.c_uint32 * 2)(128, box_rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    driver(CUDA.cuTensorMapEncodeTiled(ctypes.c_void_p(aligned), 0, 2, ctypes.c_void_p(pointer), dims, strides, box,
                                       steps, 0, 3, 3, 0), "tensor map")
    return TensorMap.from_address(aligned)


class Report:
    """The device-side report: header of 32 bytes, then 32-byte records."""

    def __init__(self, capacity=64):
        self.capacity = capacity
        self.data = torch.zeros(32 + 32 * capacity, dtype=torch.uint8, device="cuda")
        self.clear()

    def clear(self):
        self.data.zero_()
        self.data[28:32] = torch.tensor(list(self.capacity.to_bytes(4, "little")), dtype=torch.uint8, device="cuda")

    def read(self):
        raw = self.data.cpu().numpy().tobytes()
        checked, mismatches, nonfinite = np.frombuffer(raw, "<u8", 3)
        recorded = int(np.frombuffer(raw, "<u4", 1, 24)[0])
        records = np.frombuffer(raw, np.dtype([("row", "<u4"), ("column", "<u4"), ("sweep", "<u4"), ("sm", "<u4"),
                                               ("expected", "<u8"), ("got", "<u8")]), -1, 32)
        return int(checked), int(mismatches), int(nonfinite), records[:min(recorded, self.capacity)]


class Kernels:
    def __init__(self, folder, ptx_only=False):
        self.folder = folder
        self.ptx_only = ptx_only
        self.modules = {}
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def module(self, name):
        if name not in self.modules:
            self.modules[name] = Module(os.path.join(self.folder, name))
        return self.modules[name]

    def file(self, stem):
        """The cubin for sm_90, else the PTX."""
        cubin = f"{stem}.sm_90{'a' if stem.endswith('a') else ''}.cubin"
        return cubin if not self.ptx_only and os.path.exists(os.path.join(self.folder, cubin)) else f"{stem}.ptx"

    def support(self, name):
        return self.module(self.file("support")).function(name)

    def generate(self, kind, rows, columns, seed, mode):
        elements = rows * columns
        out = torch.empty(elements * BYTES[kind], dtype=torch.uint8, device="cuda")
        launch(self.support("generate_operand"), self.sms * 8, 256,
               [address(out), u64(elements), u64(seed), u32(kind), u32(mode)])
        return out.view(TORCH[kind]).view(rows, columns)

    def gemm(self, family, name, a, b, c, tile_sm=None, verify=None, checksums=None, report=None, sweep=0, module=None,
             blocks=None, stages=3):
        kind = NAMES[name]
        m, k = a.shape
        n = b.shape[0]
        k_bytes = k * BYTES[kind]
        common = [address(c), u32(m), u32(n), u32(k_bytes), address(tile_sm)]
        if family == "sm90a":
            shared = 4 * 48 * 1024 + 1024
            function = self.module(module or self.file("gemm_sm90a")).function(f"gemm_sm90a_{name}", shared)
            key = (a.data_ptr(), b.data_ptr(), m, n, k_bytes, kind)
            maps = self.__dict__.setdefault("maps", {})
            if key not in maps:
                maps[key] = (tensor_map(a.data_ptr(), m, k_bytes, 128),
                             tensor_map(b.data_ptr(), n, k_bytes, 64 if kind == F64 else 128))
            grid = min(self.sms // 2, (m // 256) * (n // (128 if kind == F64 else 256))) * 2
            launch(function, blocks or grid, 384, [maps[key][0], maps[key][1]] + common +
                   [address(verify), address(checksums), address(report.data if report else None), u32(sweep)], shared)
        elif family == "sm70":
            function = self.module(module or self.file("gemm_sm70")).function(f"gemm_sm70_{name}")
            tile = 64 if kind == F64 else 128
            launch(function, (n // tile, m // tile), 256, [address(a), address(b)] + common)
        else:
            rows, columns, threads = (64, 128, 128) if kind == F64 else (128, 256, 256)
            shared = stages * 128 * (rows + columns)
            function = self.module(module or self.file(f"gemm_{family}")).function(f"gemm_{family}_{name}",
                                                                                  3 * 128 * (rows + columns))
            launch(function, (m // rows) * (n // columns), threads, [address(a), address(b)] + common, shared)

    def verify_strips(self, c, kind, checksums, report=None, nonfinite=None, sweep=0):
        words = c.shape[1] * c.element_size() // 4
        launch(self.support("verify_strips"), self.sms * 8, 256,
               [address(c), u32(c.shape[0]), u32(words), u32(kind), address(checksums), address(nonfinite),
                address(report.data if report else None), u32(sweep)])


def result_of(name, m, n):
    kind = NAMES[name]
    dtype = torch.float64 if kind == F64 else torch.int32 if kind == S8 else torch.float32
    c = torch.empty(m, n, dtype=dtype, device="cuda")
    c.view(torch.uint8).fill_(0xFF)
    return c


def result_kind(name):
    return {"f64": KIND_F64, "s8": INTEGER}.get(name, KIND_F32)


def wide(t):
    return (t.to(torch.float32) if t.dtype == torch.float8_e4m3fn else t).to(torch.float64)


def splitmix(seed, index):
    word = (np.uint64(seed) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def expected_operand(kind, mode, seed, count):
    """The formula of KERNELS.md, in NumPy, as FP64 values."""
    w = splitmix(seed, np.arange(count))
    if mode == SIGN:
        return np.where(w >> np.uint64(63), -1.0, 1.0)
    if kind == S8:
        return (w >> np.uint64(56)).astype(np.uint8).view(np.int8).astype(np.float64)
    if mode == EXACT:
        if kind == F64:
            return (w >> np.uint64(44)).astype(np.float64) - 2.0 ** 19
        radius = 2 if kind == E4M3 else 15
        return (((w >> np.uint64(32)) * np.uint64(2 * radius + 1)) >> np.uint64(32)).astype(np.float64) - radius
    bits = {F64: 52, F32: 23, TF32: 10, BF16: 7, F16: 10, E4M3: 3}[kind]
    mantissa = ((w >> np.uint64(61 - bits)) & np.uint64((1 << bits) - 1)).astype(np.float64) / 2.0 ** bits
    exponent = ((w >> np.uint64(61)) & np.uint64(3)).astype(np.float64) - 3
    return np.where(w >> np.uint64(63), -1.0, 1.0) * (1 + mantissa) * 2.0 ** exponent


ROW_WEIGHTS = (0x7E83826A, 0xF0F5F482, 0xD74E52ED, 0xEDF2F1BD, 0xADD6F58E, 0x7C70444E, 0xB9BEBD55, 0xE6B26F4B,
               0x6BEBEAD0, 0xA5DCB1BF, 0xF181DBFB, 0x4E534DE0, 0x49AA5F64, 0x5BF68096, 0x4060D54A, 0xD145A9F2)


def expected_strip(words):
    """Checksum of 16 x 256 words."""
    column = np.arange(256, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    x = ((column + np.uint64(1)) * np.uint64(0x9E3779B9)) & mask
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(0x2C1B3C6D)) & mask
    x ^= x >> np.uint64(12)
    weight = x >> np.uint64(2) | np.uint64(1 << 30 | 1)
    turned = (weight << np.uint64(16) | weight >> np.uint64(16)) & mask | np.uint64(1)
    polynomial, weighed = np.zeros(256, dtype=np.uint64), np.zeros(256, dtype=np.uint64)
    for row, weights in zip(words, ROW_WEIGHTS):
        row = row.astype(np.uint64) & mask
        polynomial = (polynomial * np.uint64(0xD68CF43B) + row) & mask
        for shift in range(0, 32, 8):
            byte = row >> np.uint64(shift) & np.uint64(255)
            weighed += byte * np.uint64(weights >> shift & 255)
    return int((polynomial * weight).sum(dtype=np.uint64) + (weighed * turned).sum(dtype=np.uint64) & (2 ** 64 - 1))


def check_basic(kernels):
    module = Module(os.path.join(kernels.folder, "..", "check.ptx"))
    out = torch.empty(100_000, dtype=torch.int32, device="cuda")
    for seed in (0, 7, 0xDEADBEEF):
        launch(module.function("gpu_validator_check"), (100_000 + 255) // 256, 256, [address(out), u32(100_000), u32(seed)])
        values = out.cpu().numpy().view(np.uint32)
        print("check", ", ".join(f"({i}, {seed:#x}, {values[i]:#010x})" for i in (0, 1, 255, 256, 99_999)))
    if os.environ.get("OUT"):
        values.tofile(os.path.join(os.environ["OUT"], "check_deadbeef.bin"))
    for name, kind in NAMES.items():
        for mode in (EXACT, RANDOM):
            got = wide(kernels.generate(kind, 64, 1024, 0x1234567890ABCDEF, mode)).cpu().numpy().reshape(-1)
            if not np.array_equal(got, expected_operand(kind, mode, 0x1234567890ABCDEF, 65536)):
                fail(f"generator {name} mode {mode}")
    got = kernels.generate(F64, 64, 1024, 5, SIGN).cpu().numpy().reshape(-1)
    if not np.array_equal(got, expected_operand(F64, SIGN, 5, 65536)):
        fail("generator f64 signs")


def print_vectors(kernels):
    """What the tests of the Rust reference compare with."""
    for name, kind in NAMES.items():
        for mode in (EXACT, RANDOM):
            bits = kernels.generate(kind, 1, 1024, 0x1234567890ABCDEF, mode).view(torch.uint8).cpu().numpy().reshape(-1)
            values = bits.view(f"<u{BYTES[kind]}")
            print(f"vector {name} {mode}", ", ".join(f"{int(v):#x}" for v in values[:6]), f"{int(values[1023]):#x}")
    print("vector signs", [f"{int(v):#x}" for v in
                           kernels.generate(F64, 1, 64, 0x1234567890ABCDEF, SIGN).cpu().numpy().view("<u8")[0][:6]])
    strip = kernels.generate(F32, 16, 256, 77, RANDOM)
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernels.verify_strips(strip, KIND_F32, sums, nonfinite=torch.zeros(1, dtype=torch.int64, device="cuda"))
    print(f"vector strip {int(sums[0]) & (2 ** 64 - 1):#x}")


FAMILIES = [("sm90a", n) for n in ("bf16", "f16", "tf32", "e4m3", "s8", "f64", "f32")] + \
           [("sm80", n) for n in ("bf16", "f16", "tf32", "s8", "f64")] + [("sm89", "e4m3")] + \
           [("sm70", n) for n in ("f64", "f32", "bf16", "f16", "s8")]
SHAPES = [(256, 256, 128), (512, 768, 640), (2560, 1024, 2176), (4352, 8192, 1024)]


def check_gemm(kernels, shapes=SHAPES, modules=None):
    for family, name in FAMILIES:
        kind = NAMES[name]
        worst = 0.0
        for m, n, k in shapes:
            for mode in (EXACT, RANDOM):
                a = kernels.generate(kind, m, k, random.getrandbits(63), mode)
                b = kernels.generate(kind, n, k, random.getrandbits(63), mode)
                reference = wide(a) @ wide(b).t()
                c = result_of(name, m, n)
                kernels.gemm(family, name, a, b, c)
                torch.cuda.synchronize()
                again = result_of(name, m, n)
                kernels.gemm(family, name, a, b, again)
                if not torch.equal(c.view(torch.uint8), again.view(torch.uint8)):
                    fail(f"{family} {name} {m}x{n}x{k} mode {mode}: two runs differ")
                if family in ("sm80", "sm89"):
                    again = result_of(name, m, n)
                    kernels.gemm(family, name, a, b, again, stages=2)
                    if not torch.equal(c.view(torch.uint8), again.view(torch.uint8)):
                        fail(f"{family} {name} {m}x{n}x{k} mode {mode}: two stages give other bits")
                if family == "sm90a":
                    for blocks in (2, 14):
                        again = result_of(name, m, n)
                        kernels.gemm(family, name, a, b, again, blocks=blocks)
                        if not torch.equal(c.view(torch.uint8), again.view(torch.uint8)):
                            fail(f"{family} {name} {m}x{n}x{k} mode {mode}: {blocks} blocks give other bits")
                got = c.to(torch.float64)
                if mode == EXACT or kind == S8:
                    wrong = int((got != reference).sum())
                    if wrong:
                        fail(f"{family} {name} {m}x{n}x{k} exact: {wrong} of {m * n} wrong")
                else:
                    error = float((got - reference).norm() / reference.norm())
                    worst = max(worst, error)
                    if not error <= TOLERANCE[kind]:
                        fail(f"{family} {name} {m}x{n}x{k} random: relative error {error}")
        print(f"gemm {family} {name}: checked, worst relative error {worst:.2e}", flush=True)


def check_large(kernels):
    """Exact operands at the size that is burnt, element for element."""
    for family, name in FAMILIES:
        kind = NAMES[name]
        a = kernels.generate(kind, 8192, 8192, 11, EXACT)
        b = kernels.generate(kind, 8192, 8192, 12, EXACT)
        reference = wide(a) @ wide(b).t()
        c = result_of(name, 8192, 8192)
        kernels.gemm(family, name, a, b, c)
        wrong = int((c.to(torch.float64) != reference).sum())
        if wrong:
            fail(f"{family} {name} 8192 exact: {wrong} wrong, largest |value| {float(reference.abs().max())}")
        del a, b, reference, c


def check_sequential(kernels):
    """FP32 is added in the order of k, each step fused, and by both families with the same bits."""
    a = kernels.generate(F32, 256, 512, 3, RANDOM)
    b = kernels.generate(F32, 256, 512, 4, RANDOM)
    c, hopper = result_of("f32", 256, 256), result_of("f32", 256, 256)
    kernels.gemm("sm70", "f32", a, b, c)
    kernels.gemm("sm90a", "f32", a, b, hopper)
    x, y, got = a.cpu().numpy(), b.cpu().numpy(), c.cpu().numpy()
    for i in range(0, 256, 17):
        for j in range(0, 256, 13):
            s = np.float32(0)
            for k in range(512):
                s = np.float32(np.longdouble(x[i, k]) * np.longdouble(y[j, k]) + np.longdouble(s))
            if s != got[i, j]:
                fail(f"sm70 f32 order: {i} {j} {s} {got[i, j]}")
    if not torch.equal(c.view(torch.int32), hopper.view(torch.int32)):
        fail("f32 of sm90a has other bits than that of sm70")


def check_verification(kernels):
    m, n, k = 2048, 1024, 512
    for name, family in (("bf16", "sm90a"), ("s8", "sm90a"), ("f64", "sm90a"), ("f32", "sm90a"), ("f64", "sm80")):
        kind = NAMES[name]
        words = n * (2 if kind == F64 else 1)
        a, b = kernels.generate(kind, m, k, 1, RANDOM), kernels.generate(kind, n, k, 2, RANDOM)
        c, tile_sm = result_of(name, m, n), torch.full((m // 64 * n // 128,), -1, dtype=torch.int32, device="cuda")
        kernels.gemm(family, name, a, b, c, tile_sm)
        tile_rows = 64 if family == "sm80" else 128
        tiles = m // tile_rows * n // (128 if kind == F64 else 256)
        if int(tile_sm[:tiles].min()) < 0 or int(tile_sm[:tiles].max()) >= kernels.sms:
            fail(f"{name}: SM map {tile_sm[:tiles].tolist()}")
        sums = torch.zeros(m // 16 * words // 256, dtype=torch.int64, device="cuda")
        nonfinite = torch.zeros(1, dtype=torch.int64, device="cuda")
        kernels.verify_strips(c, result_kind(name), sums, nonfinite=nonfinite)
        host = c.cpu().numpy().view(np.uint32).reshape(m, words)
        for row, column in ((0, 0), (m // 16 - 1, words // 256 - 1), (17, 1)):
            if expected_strip(host[row * 16:row * 16 + 16, column * 256:column * 256 + 256]) != \
                    int(sums[row * (words // 256) + column]) & 0xFFFFFFFFFFFFFFFF:
                fail(f"{name}: checksum of strip {row} {column}")
        reference = c.clone()
        report = Report()
        kernels.verify_strips(c, result_kind(name), sums, report, sweep=3)
        if report.read()[:3] != (sums.numel(), 0, 0):
            fail(f"{name}: clean result reported {report.read()}")
        other = result_of(name, m, n)
        missed = 0
        for turn in range(1000):
            word, bit = random.randrange(m * words), random.randrange(32)
            flip = [u64(c.data_ptr() + 4 * word), u32(bit)]
            launch(kernels.support("flip_bit"), 1, 32, flip)
            report.clear()
            if family == "sm90a":
                kernels.gemm(family, name, a, b, other, None, c, sums, report, turn)
            else:
                kernels.verify_strips(c, result_kind(name), sums, report, sweep=turn)
            checked, mismatches, bad, records = report.read()
            row, column = word // words, word % words
            if checked != sums.numel() or mismatches != 1 or len(records) != 1 or \
                    tuple(records[0])[:3] != (row // 16 * 16, column // 256 * 256, turn):
                missed += 1
            if turn % 100 == 0:
                report.clear()
                launch(kernels.support("compare_elements"), kernels.sms * 8, 256,
                       [address(c), address(reference), u32(words), u32(row // 16 * 16), u32(16), u32(column // 256 * 256),
                        u32(256), u32(result_kind(name)), address(tile_sm), u32(tile_rows), u32(256), address(report.data),
                        u32(turn)])
                checked, mismatches, bad, records = report.read()
                width = 2 if kind == F64 else 1
                difference = int(records[0]["expected"]) ^ int(records[0]["got"]) if len(records) else 0
                if mismatches != 1 or (records[0]["row"], records[0]["column"]) != (row, column // width) or \
                        difference != 1 << (bit + 32 * (column % width)) or checked != 4096 // width:
                    fail(f"{name}: compare_elements {row} {column} {bit}: {report.read()}")
            launch(kernels.support("flip_bit"), 1, 32, flip)
        if missed:
            fail(f"{name}: {missed} of 1000 flipped bits missed or misplaced")
        if not torch.equal(other.view(torch.uint8)[:], c.view(torch.uint8)) and family == "sm90a":
            fail(f"{name}: product beside verification differs")
        if kind != S8:
            c[100, 200] = float("nan")
            c[300, 700] = float("-inf")
            report.clear()
            kernels.verify_strips(c, result_kind(name), sums, report)
            if report.read()[2] != 2:
                fail(f"{name}: non-finite elements not counted: {report.read()[:3]}")
            if family == "sm90a":
                report.clear()
                kernels.gemm(family, name, a, b, other, None, c, sums, report, 0)
                if report.read()[1] != 2:
                    fail(f"{name}: non-finite elements passed beside a product: {report.read()[:3]}")
        print(f"verification {name}: 1000 flips, {missed} missed", flush=True)


def check_freivalds(kernels):
    m, n, k = 4096, 2048, 3072
    for family, name in (("sm90a", "bf16"), ("sm90a", "f16"), ("sm90a", "tf32"), ("sm90a", "e4m3"), ("sm90a", "s8"),
                         ("sm90a", "f64"), ("sm90a", "f32"), ("sm80", "f64"), ("sm70", "f32")):
        kind = NAMES[name]
        a, b, c = kernels.generate(kind, m, k, 1, RANDOM), kernels.generate(kind, n, k, 2, RANDOM), result_of(name, m, n)
        kernels.gemm(family, name, a, b, c)
        r = kernels.generate(F64, n, 1, 9, SIGN)
        result_type = {"f64": F64, "s8": S32}.get(name, F32)

        def product(absolute):
            br, abr, cr = (torch.empty(x, dtype=torch.float64, device="cuda") for x in (k, m, m))
            launch(kernels.support("multiply_columns"), (k + 63) // 64, 64,
                   [address(b), u32(kind), u32(n), u32(k), address(r), address(br), u32(absolute)])
            launch(kernels.support("multiply_rows"), 512, 256,
                   [address(a), u32(kind), u32(m), u32(k), address(br), address(abr), u32(absolute)])
            launch(kernels.support("multiply_rows"), 512, 256,
                   [address(c), u32(result_type), u32(m), u32(n), address(r), address(cr), u32(absolute)])
            return abr, cr
        reference = wide(a) @ (wide(b).t() @ r.view(-1))
        abr, cr = product(0)
        bound, _ = product(1)
        own = float(((abr - reference).abs() / bound).max())
        seen = float(((cr - abr).abs() / bound).max())
        print(f"freivalds {name}: largest |C r - A (B r)| / |A| |B| |r| = {seen:.2e} (own rounding {own:.1e})")
        if own > 1e-13 or not seen <= {F64: 1e-15, E4M3: 1e-4, S8: 1e-15}.get(kind, 1e-7):
            fail(f"freivalds {name}: {seen} {own}")


def stress(kernels, modules, names, seconds=4):
    """The same product again and again: every run must give the bits of the exact reference."""
    for module in modules:
        for name in names:
            kind = NAMES[name]
            a, b = kernels.generate(kind, 8192, 8192, 31, EXACT), kernels.generate(kind, 8192, 8192, 32, EXACT)
            reference = (wide(a) @ wide(b).t()).to(result_of(name, 1, 1).dtype)
            c, runs, bad_runs, wrong, start = result_of(name, 8192, 8192), 0, 0, 0, time.time()
            while time.time() - start < seconds:
                kernels.gemm("sm90a", name, a, b, c, module=module)
                bad = int((c != reference).sum())
                runs, bad_runs, wrong = runs + 1, bad_runs + (bad != 0), wrong + bad
            print(f"stress {module} {name}: {bad_runs} of {runs} runs wrong, {wrong} elements", flush=True)
            if wrong:
                fail(f"stress {module} {name}")


class Sampler(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        pynvml.nvmlInit()
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples = []
        self.running = True

    def run(self):
        while self.running:
            self.samples.append((time.time(), pynvml.nvmlDeviceGetPowerUsage(self.gpu) / 1000,
                                 pynvml.nvmlDeviceGetClockInfo(self.gpu, pynvml.NVML_CLOCK_SM),
                                 pynvml.nvmlDeviceGetTemperature(self.gpu, pynvml.NVML_TEMPERATURE_GPU)))
            time.sleep(0.05)

    def mean(self, start, end):
        rows = [s[1:] for s in self.samples if start <= s[0] <= end]
        return tuple(sum(c) / len(rows) for c in zip(*rows)) if rows else (0, 0, 0)


def timed(run, seconds, flop, sampler):
    """Median and last-half TFLOP/s of batches, with power, clock and temperature of the second half."""
    run()
    torch.cuda.synchronize()
    rates, start = [], time.time()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(); run(); end.record(); torch.cuda.synchronize()
    batch = max(1, int(60 / begin.elapsed_time(end)))
    while time.time() - start < seconds:
        begin.record()
        for _ in range(batch):
            run()
        end.record()
        torch.cuda.synchronize()
        rates.append(flop * batch / begin.elapsed_time(end) / 1e9)
    half = rates[len(rates) // 2:]
    stop = time.time()
    return (sorted(rates)[len(rates) // 2], sum(half) / len(half)) + sampler.mean((start + stop) / 2, stop)


def torch_product(name, a, b):
    if name == "e4m3":
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                                        use_fast_accum=True)
    if name == "s8":
        return lambda: torch._int_mm(a, b.t())
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    return lambda: torch.mm(a, b.t())


def time_all(kernels, seconds, size, sampler, only=None, modules=(None,), verified=(True,), results=3, only_families=None, k=None):
    k = k or size
    print(f"{'what':32} {'median':>8} {'2nd half':>8} TFLOP/s {'power':>6} W {'clock':>5} MHz {'temp':>4}")
    names = ["bf16", "f16", "tf32", "e4m3", "s8", "f64", "f32"]
    for name in only or names:
        kind = NAMES[name]
        a, b = kernels.generate(kind, size, k, 21, RANDOM), kernels.generate(kind, size, k, 22, RANDOM)
        flop = 2.0 * size ** 2 * k

        def line(what, run):
            torch.cuda.synchronize()
            r = timed(run, seconds, flop, sampler)
            print(f"{what:32} {r[0]:8.1f} {r[1]:8.1f}         {r[2]:6.0f}   {r[3]:5.0f}     {r[4]:4.0f}", flush=True)
            return r[1]
        base = line(f"torch {name}", torch_product(name, a, b))
        for family, entry in FAMILIES:
            if entry != name or (only_families and family not in only_families):
                continue
            for module in modules if family == "sm90a" else (None,):
                c = [result_of(name, size, size) for _ in range(results)]
                words = size * (2 if kind == F64 else 1)
                sums = torch.zeros(size // 16 * words // 256, dtype=torch.int64, device="cuda")
                nonfinite = torch.zeros(1, dtype=torch.int64, device="cuda")
                report = Report()
                for x in c:
                    kernels.gemm(family, name, a, b, x, module=module)
                kernels.verify_strips(c[0], result_kind(name), sums, nonfinite=nonfinite)
                for check in verified if family == "sm90a" else (True,):
                    state = [0]

                    def run():
                        i = state[0] = state[0] + 1
                        fused = family == "sm90a" and check
                        kernels.gemm(family, name, a, b, c[i % results], None, c[(i - 1) % results] if fused else None,
                                     sums, report, i, module=module)
                        if family != "sm90a" and check:
                            kernels.verify_strips(c[i % results], result_kind(name), sums, report, sweep=i)
                    rate = line(f"{family} {name} {'verified' if check else 'unverified'} {module or ''}", run)
                    print(f"    {rate / base:.3f} of torch", flush=True)
                    if check:
                        checked, mismatches, bad, records = report.read()
                        if mismatches or bad or checked % sums.numel() or checked == 0:
                            fail(f"{family} {name}: {checked} {mismatches} {bad} {records[:4]}")
                del c


def main():
    kernels = Kernels(sys.argv[1])
    what = sys.argv[2:] or ["check", "time"]
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    random.seed(int(os.environ.get("SEED", time.time_ns())))
    if "check" in what:
        begin = time.time()
        for step in (check_basic, check_gemm, check_sequential, check_large, check_verification, check_freivalds):
            try:
                step(kernels)
                torch.cuda.synchronize()
            except Exception as error:  # one broken step must not hide the others
                fail(f"{step.__name__}: {error!r}")
            print(f"-- {step.__name__} done at {time.time() - begin:.1f} s", flush=True)
    if "ptx" in what:
        for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.ptx"))):
            begin = time.time()
            Module(path)
            print(f"translating {os.path.basename(path)}: {(time.time() - begin) * 1000:.0f} ms")
        translated = Kernels(sys.argv[1], ptx_only=True)
        check_gemm(translated, SHAPES[:3])
        check_verification(translated)
    if "vectors" in what:
        print_vectors(kernels)
    if "small" in what:  # for compute-sanitizer
        check_basic(kernels)
        check_gemm(kernels, SHAPES[:2])
        check_sequential(kernels)
    sampler = Sampler()
    sampler.start()
    if "time" in what:
        only, families = os.environ.get("ONLY"), os.environ.get("FAMILIES")
        time_all(kernels, 1.5, 8192, sampler, only.split(",") if only else None,
                 only_families=families.split(",") if families else None)
    if "variants" in what:
        modules = [os.path.basename(p) for p in sorted(glob.glob(os.path.join(sys.argv[1], "gemm_sm90a.*.cubin")))]
        time_all(kernels, 3, 8192, sampler, ["bf16"], modules, (True, False), only_families=("sm90a",))
    if "stress" in what:
        modules = [os.path.basename(p) for p in sorted(glob.glob(os.path.join(sys.argv[1], "gemm_sm90a.*.cubin")))]
        stress(kernels, modules, os.environ.get("ONLY", "bf16,f16,tf32,e4m3,s8,f64,f32").split(","))
    if "sustained" in what:
        time_all(kernels, 10, 8192, sampler, ["bf16"], verified=(True, False), only_families=("sm90a",))
        for name, k in (("bf16", 16384), ("f16", 16384), ("tf32", 8192), ("e4m3", 32768), ("s8", 32768), ("f64", 4096),
                        ("f32", 8192)):
            print(f"8192 x 8192 x {k}")
            time_all(kernels, 3, 8192, sampler, [name], verified=(True, False), only_families=("sm90a",), k=k)
    print(f"{len(FAILURES)} failures")
    sys.exit(1 if FAILURES else 0)


if __name__ == "__main__":
    main()
