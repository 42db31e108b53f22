"""Holds what NVIDIA's own Python binding, gpustat and nvitop show of a simulated node against its scenario.

`cargo xtask nvml-clients` runs it on several nodes. On one, with what requirements.txt names installed:

    cargo xtask simulate p5.48xlarge -- python3 tests/simulator/clients/compare.py

The scenario is read from the node's folder (GPU_SIMULATOR_NODE). Ends with 1 and says what differs, if anything does.
"""

import json
import os
import pathlib
import subprocess
import sys

import pynvml

# Readings follow a model in time, so two readings of an idle GPU may differ by rounding.
POWER_TOLERANCE_W = 1
# NVML_NVLINK_MAX_LINKS of driver 580; newer bindings know of more.
NVLINKS = 18

differences = []


def check(what, shown, expected):
    if shown != expected:
        differences.append(f"{what}: shown {shown!r}, the scenario says {expected!r}")


def near(what, shown, expected, tolerance):
    if shown is None or abs(shown - expected) > tolerance:
        differences.append(f"{what}: shown {shown!r}, the scenario says {expected!r}")


def answer(call, *arguments):
    """The call's value, or None where NVML says that the GPU does not have it."""
    try:
        return call(*arguments)
    except pynvml.NVMLError_NotSupported:
        return None


def seen_by_nvml(scenario):
    return [gpu for gpu in scenario["gpus"] if gpu["visible_to"]["nvml"] and not gpu["lost"]]


def check_binding(scenario):
    pynvml.nvmlInit()
    driver = scenario["driver"]
    check("driver version", pynvml.nvmlSystemGetDriverVersion(), driver["version"])
    major, minor = driver["cuda_version"]
    check("CUDA version", pynvml.nvmlSystemGetCudaDriverVersion_v2(), 1000 * major + 10 * minor)
    gpus = seen_by_nvml(scenario)
    check("number of GPUs", pynvml.nvmlDeviceGetCount(), len(gpus))
    for index, gpu in enumerate(gpus):
        check_gpu(f"GPU {index}", pynvml.nvmlDeviceGetHandleByIndex(index), gpu)
    pynvml.nvmlShutdown()


def check_gpu(name, handle, gpu):
    check(f"{name} name", pynvml.nvmlDeviceGetName(handle), gpu["name"])
    check(f"{name} UUID", pynvml.nvmlDeviceGetUUID(handle), gpu["uuid"])
    check(f"{name} by UUID", pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(gpu["uuid"])), int(name[4:]))
    check(f"{name} serial", answer(pynvml.nvmlDeviceGetSerial, handle), gpu["serial"])
    check(f"{name} VBIOS", pynvml.nvmlDeviceGetVbiosVersion(handle), gpu["vbios"])
    address = pynvml.nvmlDeviceGetPciInfo(handle).busId.lower()[4:]
    check(f"{name} PCI address", address, gpu["pci_address"][:-1] + "0")
    check(f"{name} compute capability", list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)), gpu["compute_capability"])
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    check(f"{name} memory", memory.total, gpu["memory"])
    check(f"{name} reserved memory", memory.reserved, gpu["memory_reserved"])
    near(f"{name} power", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000, gpu["power"]["idle_mw"] / 1000, POWER_TOLERANCE_W)
    check(f"{name} power limit", pynvml.nvmlDeviceGetEnforcedPowerLimit(handle), gpu["power"]["limit_mw"])
    check(f"{name} temperature", pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU), gpu["temperature"]["idle_c"])
    check(f"{name} SM clock", pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM), gpu["clocks"]["idle"]["sm_mhz"])
    check(f"{name} persistence mode", pynvml.nvmlDeviceGetPersistenceMode(handle), int(gpu["persistence_mode"]))
    ecc = answer(pynvml.nvmlDeviceGetEccMode, handle)
    check(f"{name} ECC mode", ecc and bool(ecc[0]), gpu["ecc"]["mode"] if ecc else None)
    check_memory_health(name, handle, gpu)
    check_links(name, handle, gpu)
    mig = answer(pynvml.nvmlDeviceGetMigMode, handle)
    check(f"{name} MIG mode", mig and bool(mig[0]), gpu["mig"]["mode"] if mig else None)
    check_mig_devices(name, handle, gpu)


def check_memory_health(name, handle, gpu):
    if gpu["ecc"]["mode"]:
        errors = pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
        counts = gpu["ecc"]["volatile"]
        check(f"{name} uncorrectable errors", errors, sum(value for key, value in counts.items() if "uncorrectable" in key))
    rows = answer(pynvml.nvmlDeviceGetRemappedRows, handle)
    expected = gpu["row_remapping"]
    if expected is None:
        check(f"{name} remapped rows", rows, None)
    else:
        wanted = [expected["correctable"], expected["uncorrectable"], int(expected["pending"]), int(expected["failure"])]
        check(f"{name} remapped rows", list(rows), wanted)


def check_links(name, handle, gpu):
    check(f"{name} PCIe width", pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle), gpu["pcie"]["width"] or gpu["pcie"]["max_width"])
    for link in range(NVLINKS):
        expected = None if link >= gpu["nvlink"]["count"] else int(link not in gpu["nvlink"]["down"])
        check(f"{name} NVLink {link}", answer(pynvml.nvmlDeviceGetNvLinkState, handle, link), expected)
    fabric = pynvml.c_nvmlGpuFabricInfo_v3_t()
    registered = answer(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, pynvml.byref(fabric)) is not None
    check(f"{name} fabric", registered, gpu["fabric"] is not None)
    if registered:
        states = ["not-supported", "not-started", "in-progress", "completed"]
        check(f"{name} fabric state", states[fabric.state], gpu["fabric"]["state"])


def check_mig_devices(name, handle, gpu):
    if not gpu["mig"]["mode"]:
        return
    shown = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        shown.append((pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetMemoryInfo(device).total))
    instances = gpu["mig"]["instances"]
    expected = [(it["uuid"], it["memory"]) for it in instances if it["compute_instance"]]
    check(f"{name} MIG devices", shown, expected)


def check_gpustat(scenario):
    output = subprocess.run([sys.executable, "-m", "gpustat", "--json"], capture_output=True, text=True, check=True)
    shown = json.loads(output.stdout)
    check("gpustat driver version", shown["driver_version"], scenario["driver"]["version"])
    gpus = seen_by_nvml(scenario)
    check("gpustat number of GPUs", len(shown["gpus"]), len(gpus))
    for row, gpu in zip(shown["gpus"], gpus):
        name = f"gpustat GPU {row['index']}"
        check(f"{name} name", row["name"], gpu["name"])
        check(f"{name} UUID", row["uuid"], gpu["uuid"])
        check(f"{name} temperature", row["temperature.gpu"], gpu["temperature"]["idle_c"])
        check(f"{name} memory", row["memory.total"], gpu["memory"] >> 20)
        near(f"{name} power", row["power.draw"], gpu["power"]["idle_mw"] / 1000, POWER_TOLERANCE_W)
        near(f"{name} power limit", row["enforced.power.limit"], gpu["power"]["limit_mw"] / 1000, POWER_TOLERANCE_W)


def check_nvitop(scenario):
    program = pathlib.Path(sys.executable).parent / "nvitop"
    output = subprocess.run([str(program), "--once", "--no-unicode"], capture_output=True, text=True, check=True)
    check("nvitop shows the driver", scenario["driver"]["version"] in output.stdout, True)
    for gpu in seen_by_nvml(scenario):
        address = "0000" + gpu["pci_address"].upper()[:-1] + "0"
        check(f"nvitop shows {address}", address in output.stdout, True)
        limit = f"/ {gpu['power']['limit_mw'] // 1000}W"
        check(f"nvitop shows the limit of {address}", limit in output.stdout, True)


def main():
    node = pathlib.Path(os.environ["GPU_SIMULATOR_NODE"])
    resolved = json.loads((node / "scenario/scenario.json").read_text())
    scenario = resolved["base"]
    check_binding(scenario)
    check_gpustat(scenario)
    check_nvitop(scenario)
    for difference in differences:
        print(difference)
    count = len(seen_by_nvml(scenario))
    verdict = f"{len(differences)} differences" if differences else f"nvidia-ml-py, gpustat and nvitop agree on {count} GPUs"
    print(f"{resolved['name']}: {verdict}")
    sys.exit(1 if differences else 0)


main()
