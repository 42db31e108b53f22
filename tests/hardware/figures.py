#!/usr/bin/env python3
"""Measures on a machine with GPUs what BENCHMARKS.md reports: the validator, an older build beside it, and torch.

    tests/hardware/figures.py --validator FILE [--old FILE] [--python FILE] [--gpus N] [--seconds S] --out DIR

Needs Python 3.8 and the portable binaries; torch, JAX and CuPy where they are installed. DIR receives figures.json (raw
figures) and facts.json (the anonymized facts of one run). No setting of a GPU is changed. Exit code 3: fewer GPUs than
`--gpus`; 1: a section failed, or a run had a verdict that is not expected; 0 otherwise.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PRECISIONS = ["bf16", "fp16", "tf32", "fp8", "int8", "fp64", "fp32"]

TORCH_RATES = r"""
import json, sys, time, torch
seconds = float(sys.argv[1])
def rate(call, flops):
    for _ in range(3): call()
    torch.cuda.synchronize()
    halves, began = [], time.monotonic()
    while time.monotonic() - began < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4): call()
        end.record(); torch.cuda.synchronize()
        halves.append(4 * flops / start.elapsed_time(end) / 1e9)
    half = halves[len(halves) // 2:]
    return sum(half) / len(half)
n, out = 8192, {}
for name, kind, size in [("bf16", torch.bfloat16, n), ("fp16", torch.float16, n), ("fp64", torch.float64, n), ("fp32", torch.float32, n)]:
    a, b = (torch.randn(size, size, device="cuda", dtype=kind) for _ in range(2))
    out[name] = rate(lambda: torch.mm(a, b), 2 * size ** 3)
    del a, b
torch.backends.cuda.matmul.allow_tf32 = True
a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
out["tf32"] = rate(lambda: torch.mm(a, b), 2 * n ** 3)
copy = torch.empty(4 << 30, dtype=torch.uint8, device="cuda"); to = torch.empty_like(copy)
for _ in range(3): to.copy_(copy)
torch.cuda.synchronize(); began = time.monotonic()
for _ in range(20): to.copy_(copy)
torch.cuda.synchronize()
out["copy_bytes_per_s"] = 20 * 2 * copy.numel() / (time.monotonic() - began)
print(json.dumps(out))
"""

NEWCOMER = r"""
import ctypes, json, sys, time
share = float(sys.argv[1])
began = time.monotonic()
cuda = ctypes.CDLL("libcuda.so.1")
times, device, context = {}, ctypes.c_int(), ctypes.c_void_p()
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    times[name] = time.monotonic() - began
    if code: print(json.dumps({"failed": name, "code": code, "times": times})); sys.exit(1)
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(total.value * share)))
time.sleep(0.2)
call("cuMemFree_v2", pointer)
print(json.dumps({"free_at_first_look": free.value, "total": total.value, "times": times}))
"""

# Products that a job of PyTorch finishes in the first second after its first one began.
FIRST_SECOND = r"""
import json, time, torch
a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
began, products = time.monotonic(), 0
while time.monotonic() - began < 1.0:
    torch.mm(a, b); torch.cuda.synchronize(); products += 1
print(json.dumps({"products": products}))
"""


def run(command, **options):
    """Runs a command; returns exit code, seconds, standard output and standard error."""
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, **options)
    return done.returncode, time.monotonic() - began, done.stdout, done.stderr


class Measurement:
    """The sections share the programs, the folder and the figures."""

    def __init__(self, options):
        self.options = options
        self.out = Path(options.out)
        self.figures = {}
        self.failures = []
        sysroot = ["--sysroot", options.simulated] if options.simulated else []
        self.sysroot, self.simulated = sysroot, ["--simulated-ok", *sysroot] if sysroot else []

    def validators(self):
        """The new binary, and the old one after it: figures of one run are compared, taken in turns."""
        yield "new", self.options.validator
        if self.options.old:
            yield "old", self.options.old

    def validate(self, which, binary, *arguments):
        """One `run`; returns its report with the wall time."""
        folder = Path(tempfile.mkdtemp(dir=self.out))
        report, facts = folder / "report.json", folder / "facts.json"
        command = [binary, "run", *arguments, "--json", str(report), "--facts", str(facts), *self.simulated]
        code, seconds, stdout, stderr = run(command)
        if not report.exists():
            raise RuntimeError("%s: exit code %s: %s%s" % (" ".join(command), code, stdout[-500:], stderr[-1500:]))
        result = json.loads(report.read_text())
        result["wall_s"], result["code"] = seconds, code
        result["facts"] = json.loads(facts.read_text()) if facts.exists() else {}
        not_green = [f for f in result.get("findings", []) if f["verdict"] in ("fail", "error")]
        for finding in not_green:
            self.failures.append("%s %s: %s: %s" % (which, " ".join(arguments), finding["check"], finding["summary"]))
        return result

    def level_quick(self):
        walls = {}
        for _ in range(self.options.repeat):
            for which, binary in self.validators():
                walls.setdefault(which, []).append(self.validate(which, binary, "--level", "quick")["wall_s"])
            _, seconds, _, _ = run(["nvidia-smi", "-q"])
            walls.setdefault("nvidia-smi -q", []).append(seconds)
        return {name: summary(it, "s") for name, it in walls.items()}

    def level_standard(self):
        figures = {}
        for _ in range(max(1, self.options.repeat // 2)):
            for which, binary in self.validators():
                result = self.validate(which, binary, "--level", "standard")
                rows = result.get("burn", [])
                of = figures.setdefault(which, {"wall_s": [], "tflops": [], "power_w": [], "start_ms": [], "after_load_ms": []})
                of["wall_s"].append(result["wall_s"])
                of["tflops"] += [row["tflops"] for row in rows if row.get("tflops")]
                of["power_w"] += [row["power_w"] for row in rows if row.get("power_w")]
                for burn in result["facts"].get("load", {}).get("burn", {}).values():
                    started = burn.get("value", {}).get("start_to_load_ms")
                    of["start_ms"] += [started] if started else []
                timings = result.get("timings_ms") or {}
                of["after_load_ms"] += [value for name, value in timings.items() if "after" in name]
        return {which: {name: summary(it) for name, it in of.items() if it} for which, of in figures.items()}

    def precisions(self):
        """Each precision in turns: new, old; torch once, before and after."""
        figures = {"torch": [self.torch()]}
        seconds = "%gs" % self.options.seconds
        for precision in PRECISIONS:
            for which, binary in self.validators():
                arguments = ["--level", "standard", "--burn-precision", precision, "--burn-duration", seconds]
                result = self.validate(which, binary, *arguments)
                rates = [row["tflops"] for row in result.get("burn", []) if row.get("tflops")]
                figures.setdefault(precision, {})[which] = rates
        figures["torch"].append(self.torch())
        return figures

    def torch(self):
        code, _, stdout, stderr = run([self.options.python, "-c", TORCH_RATES, str(self.options.seconds)])
        return json.loads(stdout) if code == 0 else {"error": stderr[-300:]}

    def memory(self):
        """The memory workload: bytes verified a second, and how much of the memory."""
        result = self.validate("new", self.options.validator, "--level", "extended")
        runs = [it for it in result["facts"].get("load", {}).get("runs", []) if it["id"]["workload"] == "memory"]
        return {"wall_s": result["wall_s"], "runs": runs}

    def environments(self):
        """Discovery with 20 environments, and the proof of the named one against its own import."""
        folder = Path(tempfile.mkdtemp(dir=self.out))
        for number in range(20):
            run([self.options.python, "-m", "venv", "--without-pip", str(folder / ("venv%d" % number))])
        named = [word for number in range(20) for word in ("--python", str(folder / ("venv%d" % number)))]
        binary = self.options.validator
        discovery = [run([binary, "environment", "--no-start", "--json", *named, *self.sysroot])[1] for _ in range(3)]
        imports = [run([self.options.python, "-c", "import torch; torch.zeros(1).cuda()"])[1] for _ in range(3)]
        proofs, findings = [], []
        for _ in range(3):
            code, seconds, stdout, stderr = run([binary, "environment", "--json", "--python", self.options.python, *self.sysroot])
            proofs.append(seconds)
            findings = json.loads(stdout).get("findings", []) if stdout.startswith("{") else [{"stderr": stderr[-500:], "code": code}]
        return {
            "discovery_of_20_s": summary(discovery),
            "import_torch_and_one_tensor_s": summary(imports),
            "proof_s": summary(proofs),
            "findings": [{k: f.get(k) for k in ("check", "verdict", "summary")} for f in findings],
        }

    def sentinel(self):
        """Newcomers that want 90 % of the memory, while the sentinel holds 88 % of it, and while it holds its default."""
        return {memory: self.newcomers(memory) for memory in ("88%", "2GiB")}

    def start_sentinel(self, name, *arguments):
        """Returns the process and its status file."""
        status_file = self.out / ("sentinel-%s.json" % name)
        command = [self.options.validator, "sentinel", *arguments, "--grace", "0.2s", "--quiet", "0.2s"]
        command += ["--starts-an-hour", "100000", "--status-file", str(status_file), *self.simulated]
        log = (self.out / ("sentinel-%s.log" % name)).open("w")
        return subprocess.Popen(command, stdout=log, stderr=log), status_file

    def first_second(self):
        """What a job of PyTorch loses in its first second to a sentinel that works until it comes: in turns, with and without."""
        counts = {"alone": [], "sentinel": []}
        for _ in range(self.options.repeat):
            for which, products in counts.items():
                if which == "sentinel":
                    process, status_file = self.start_sentinel("first-second", "--memory", "88%")
                    self.working(status_file, process)
                _, _, stdout, stderr = run([self.options.python, "-c", FIRST_SECOND])
                if which == "sentinel":
                    process.terminate()
                    process.wait()
                if not stdout.startswith("{"):
                    raise RuntimeError(stderr[-300:])
                products.append(json.loads(stdout)["products"])
        return {name: summary(products) for name, products in counts.items()}

    def sweeps(self):
        """A thousand verified passes or products of every workload of the sentinel; a mismatch is a failure. `check` makes one pass a second."""
        figures = {}
        for workload, wanted in (("memory", 1000), ("check", min(1000, int(self.options.sweep_seconds / 2))), ("gemm", 1000)):
            process, status_file = self.start_sentinel("sweeps-" + workload, "--workload", workload, "--memory", "1GiB")
            began, gpu = time.monotonic(), {}
            try:
                while time.monotonic() - began < self.options.sweep_seconds and self.sweeps_of(gpu) < wanted:
                    time.sleep(0.5)
                    gpu = json.loads(status_file.read_text())["gpus"][0] if status_file.exists() else {}
            finally:
                process.terminate()
                process.wait()
            figures[workload] = {"seconds": time.monotonic() - began, "status": gpu}
            if self.sweeps_of(gpu) < wanted or gpu.get("mismatches") or gpu.get("finding"):
                self.failures.append("sweeps %s: %s" % (workload, gpu))
        return figures

    @staticmethod
    def sweeps_of(gpu):
        products = sum(it["products"] for it in (gpu.get("coverage") or {}).values())
        return max(gpu.get("passes", 0), products)

    def newcomers(self, memory):
        process, status_file = self.start_sentinel(memory.strip("%"), "--memory", memory)
        trials = []
        try:
            for _ in range(self.options.newcomers):
                if not self.working(status_file, process):
                    trials.append({"failed": "the sentinel did not work within 60 s"})
                    break
                time.sleep(0.2)
                _, _, stdout, stderr = run([self.options.python, "-c", NEWCOMER, "0.9"])
                trials.append(json.loads(stdout) if stdout.startswith("{") else {"failed": stderr[-300:]})
            self.working(status_file, process)
            before = json.loads(status_file.read_text())["gpus"][0]["yields"]
            for _ in range(20):
                run(["nvidia-smi", "-q"])
            status = json.loads(status_file.read_text())
        finally:
            began = time.monotonic()
            process.terminate()
            code = process.wait()
            stopped_s = time.monotonic() - began
        failed = [trial for trial in trials if "failed" in trial]
        for trial in failed:
            self.failures.append("sentinel %s: %s" % (memory, trial))
        allocated = [trial["times"]["cuMemAlloc_v2"] for trial in trials if "times" in trial]
        return {
            "trials": len(trials),
            "failed": failed,
            "newcomer_to_allocation_s": summary(allocated),
            "yields_by_20_monitors": status["gpus"][0]["yields"] - before,
            "stopped_s": stopped_s,
            "exit_code": code,
            "status": status["gpus"][0],
        }

    @staticmethod
    def working(status_file, process):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if json.loads(status_file.read_text())["gpus"][0]["state"] == "working":
                    return True
            except (OSError, ValueError, IndexError):
                pass
            time.sleep(0.05)
        return False

    def allocation(self):
        """Several workers a GPU; scaling, leaks after kills, oversubscription."""
        facts = self.out / "allocation-facts.json"
        command = [self.options.validator, "allocation", "--duration", "15s", "--facts", str(facts)]
        code, seconds, stdout, stderr = run([*command, *self.sysroot])
        if not facts.exists():
            raise RuntimeError("exit code %s: %s%s" % (code, stdout[-500:], stderr[-500:]))
        if code not in (0, 2 if self.sysroot else 0):
            self.failures.append("allocation: exit code %s: %s" % (code, stdout[-1500:]))
        return {"wall_s": seconds, "exit_code": code, "text": stdout[-4000:], "allocation": json.loads(facts.read_text())["load"].get("allocation")}

    def facts(self):
        """For tests/facts: what the validator reads of this machine, without names and serial numbers."""
        arguments = ["collect", "--anonymize", "--level", "standard", "--output", str(self.out / "facts.json"), *self.sysroot]
        code, seconds, _, stderr = run([self.options.validator, *arguments])
        if code != 0:
            raise RuntimeError("collect: exit code %s: %s" % (code, stderr[-500:]))
        return {"wall_s": seconds}

    def false_alarms(self):
        """Burns of a second, all precisions in rotation, until the time is over; every finding is in `failures`."""
        began, runs = time.monotonic(), 0
        while time.monotonic() - began < self.options.false_alarm_seconds:
            precision = PRECISIONS[runs % len(PRECISIONS)]
            self.validate("new", self.options.validator, "--level", "standard", "--burn-precision", precision, "--burn-duration", "1s")
            runs += 1
        return {"runs": runs, "seconds": time.monotonic() - began}

    def section(self, name, measure):
        print("== %s" % name, flush=True)
        try:
            self.figures[name] = measure()
        except Exception as error:  # a section that fails must not take the others with it
            self.failures.append("%s: %s" % (name, error))
            self.figures[name] = {"error": str(error)}
        print(json.dumps(self.figures[name])[:1500], flush=True)
        write(self.out / "figures.json", json.dumps({"figures": self.figures, "failures": self.failures}, indent=1))


def summary(values, unit=None):
    if not values:
        return None
    it = {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values), "all": values[:50]}
    if unit:
        it["unit"] = unit
    return it


def write(path, text):
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(str(unfinished), str(path))


def gpus_here():
    code, _, stdout, _ = run(["nvidia-smi", "-L"])
    return [line for line in stdout.splitlines() if line.startswith("GPU ")] if code == 0 else []


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validator", required=True)
    parser.add_argument("--old")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each precision, and of each rate of torch")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--newcomers", type=int, default=50, help="trials of the sentinel, for each amount of memory")
    parser.add_argument("--false-alarm-seconds", type=float, default=60.0)
    parser.add_argument("--sweep-seconds", type=float, default=60.0, help="limit of a thousand passes of one workload")
    parser.add_argument("--sections", help="only these, separated by commas")
    parser.add_argument("--simulated", metavar="SYSROOT", help="the GPUs are simulated, with the host's files below SYSROOT")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def main():
    options = arguments()
    here = gpus_here()
    if not options.simulated and len(here) < options.gpus:
        print("%d GPUs are needed, nvidia-smi lists %d" % (options.gpus, len(here)), file=sys.stderr)
        return 3
    Path(options.out).mkdir(parents=True, exist_ok=True)
    measurement = Measurement(options)
    measurement.figures["machine"] = {"gpus": here, "uname": list(os.uname()), "validator": run([options.validator, "--version"])[2]}
    sections = {
        "level_quick": measurement.level_quick,
        "level_standard": measurement.level_standard,
        "precisions": measurement.precisions,
        "memory": measurement.memory,
        "sentinel": measurement.sentinel,
        "first_second": measurement.first_second,
        "sweeps": measurement.sweeps,
        "allocation": measurement.allocation,
        "environments": measurement.environments,
        "facts": measurement.facts,
        "false_alarms": measurement.false_alarms,
    }
    wanted = options.sections.split(",") if options.sections else list(sections)
    for name in wanted:
        if name not in sections:
            print("--sections: %s is none of %s" % (name, ", ".join(sections)), file=sys.stderr)
            return 3
    for name in wanted:
        measurement.section(name, sections[name])
    print("\n".join(["", "%d findings and sections that are not right" % len(measurement.failures), *measurement.failures[:40]]))
    return 1 if measurement.failures else 0


if __name__ == "__main__":
    sys.exit(main())
