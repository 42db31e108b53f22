"""Runs nvidia-smi itself on a simulated node, and holds what it prints against the node's scenario and NVIDIA's captures.

`cargo xtask nvml-clients` runs it on several nodes. On one, with a program of Debian's package nvidia-smi (535.261.03):

    cargo xtask simulate h200x1 -- python3 tests/simulator/clients/nvidia_smi.py /path/to/nvidia-smi

The captures are of nvidia-smi 580.159.04, so that what only one of the two versions prints is listed here, with what it is. Every
other element must be in both and equal. Ends with 1 and prints what differs, if anything does.
"""

import csv
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

CAPTURES = pathlib.Path(__file__).parent.parent / "captures"

# Elements that nvidia-smi 580 prints and 535 does not know.
NEW_IN_580 = [
    "display_attached",
    "pdi",
    "platformInfo",
    "c2c_mode",
    "gpu_virtualization_mode/vgpu_heterogeneous_mode",
    "gpu_recovery_action",
    "pci/pci_base_class",
    "pci/pci_sub_class",
    "clocks_event_reasons_counters",
    "dram_encryption_mode",
    "ecc_errors/aggregate/channel_repair_pending",
    "ecc_errors/aggregate/tpc_repair_pending",
    "ecc_errors/aggregate/unrepairable_memory",
    "ecc_errors/channel_repair_pending",
    "ecc_errors/tpc_repair_pending",
    "ecc_errors/unrepairable_memory",
    "remapped_rows/remapped_row_corr_inactive",
    "remapped_rows/remapped_row_unc_inactive",
    "gpu_power_readings/average_power_draw",
    "gpu_power_readings/instant_power_draw",
    "gpu_memory_power_readings",
    "module_power_readings/average_power_draw",
    "module_power_readings/instant_power_draw",
    "power_smoothing",
    "power_profiles",
    "fabric/cliqueId",
    "fabric/clusterUuid",
    "fabric/health",
    "capabilities",
]
# Elements that only 535 prints.
GONE_IN_580 = [
    "gpu_module_id",
    "gpu_reset_status",
    "gpu_power_readings/power_draw",
    "module_power_readings/power_draw",
    "voltage",
]
# Elements whose values differ between the two versions, by 535's value.
OTHER_WORDS = {
    "display_mode": "Enabled",
    "inforom_bbx_flush/latest_timestamp": "No data",
    "inforom_bbx_flush/latest_duration": "No data",
}
# 535 rounds what is reserved down, 580 up.
ROUNDED_MIB = ["fb_memory_usage/reserved", "fb_memory_usage/free", "fb_memory_usage/used"]

QUERY = "index,name,uuid,pci.bus_id,driver_version,memory.total,temperature.gpu,power.limit,clocks.max.sm,ecc.mode.current"

differences = []


def check(what, shown, expected):
    if shown != expected:
        differences.append(f"{what}: shown {shown!r}, expected {expected!r}")


def nvidia_smi(program, *arguments):
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    if run.returncode != 0:
        differences.append(f"nvidia-smi {' '.join(arguments)} ends with {run.returncode}: {run.stdout}{run.stderr}")
    return run.stdout


def leaves(element, path=""):
    """Values by path; elements of one name are numbered."""
    counts = {}
    values = {}
    for child in element:
        number = counts.get(child.tag, 0)
        counts[child.tag] = number + 1
        name = child.tag if number == 0 else f"{child.tag}#{number}"
        here = f"{path}/{name}" if path else name
        if len(child):
            values.update(leaves(child, here))
        else:
            values[here] = (child.text or "").strip()
    return values


def below(path, prefixes):
    return any(path == it or path.startswith(it + "/") for it in prefixes)


def mib(text):
    return int(text.removesuffix(" MiB"))


def check_against_capture(shown, capture):
    shown, capture = shown.findall("gpu"), capture.findall("gpu")
    check("-q -x number of GPUs", len(shown), len(capture))
    for number, (one, other) in enumerate(zip(shown, capture)):
        one, other = leaves(one), leaves(other)
        for path in sorted(one.keys() - other.keys()):
            if not below(path, GONE_IN_580):
                differences.append(f"-q -x GPU {number}: {path} is not in the capture")
        for path in sorted(other.keys() - one.keys()):
            if not below(path, NEW_IN_580):
                differences.append(f"-q -x GPU {number}: {path} of the capture is missing")
        for path in sorted(one.keys() & other.keys()):
            if path in OTHER_WORDS:
                check(f"-q -x GPU {number} {path}", one[path], OTHER_WORDS[path])
            elif path in ROUNDED_MIB:
                check(f"-q -x GPU {number} {path}", abs(mib(one[path]) - mib(other[path])) <= 1, True)
            else:
                check(f"-q -x GPU {number} {path}", one[path], other[path])


def check_list(program, gpus):
    lines = nvidia_smi(program, "-L").splitlines()
    rows = [line for line in lines if line.startswith("GPU ")]
    check("-L", rows, [f"GPU {n}: {gpu['name']} (UUID: {gpu['uuid']})" for n, gpu in enumerate(gpus)])


def check_table(program, scenario, gpus):
    table = nvidia_smi(program)
    check("the table's driver", f"Driver Version: {scenario['driver']['version']}" in table, True)
    for gpu in gpus:
        address = "0000" + gpu["pci_address"].upper()[:-1] + "0"
        check(f"the table shows {address}", address in table, True)
    busy = [it for it in scenario["processes"].values() if it["listed"]]
    check("the table says that nobody computes", "No running processes found" in table, not busy)
    for process in busy:
        check(f"the table shows process {process['pid']}", str(process["pid"]) in table, True)


def check_csv(program, scenario, gpus):
    text = nvidia_smi(program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    check("--query-gpu rows", len(rows), len(gpus))
    for number, (row, gpu) in enumerate(zip(rows, gpus)):
        ecc = {True: "Enabled", False: "Disabled", None: "[N/A]"}[gpu["ecc"]["mode"]]
        expected = [
            str(number),
            gpu["name"],
            gpu["uuid"],
            "0000" + gpu["pci_address"].upper()[:-1] + "0",
            scenario["driver"]["version"],
            str(gpu["memory"] >> 20),
            str(gpu["temperature"]["idle_c"]),
            f"{gpu['power']['limit_mw'] / 1000:.2f}",
            str(gpu["clocks"]["max"]["sm_mhz"]),
            ecc,
        ]
        check(f"--query-gpu row {number}", row, expected)


def check_topology(program, gpus):
    matrix = nvidia_smi(program, "topo", "-m")
    rows = [line.split("\t") for line in matrix.splitlines() if re.match(r"GPU\d+\t", line)]
    check("topo -m rows", len(rows), len(gpus))
    for number, row in enumerate(rows):
        cells = [cell.strip() for cell in row[1 : 1 + len(gpus)]]
        links = gpus[number]["nvlink"]
        for other, cell in enumerate(cells):
            if other == number:
                check(f"topo -m GPU {number} and itself", cell, "X")
            elif links["count"] and links["remote"] == "switch":
                check(f"topo -m GPU {number} and {other}", cell, f"NV{links['count'] - len(links['down'])}")
            else:
                known = re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell) is not None
                check(f"topo -m GPU {number} and {other} ({cell})", known, True)


def check_links(program, gpus):
    text = nvidia_smi(program, "nvlink", "-s")
    blocks = re.split(r"(?m)^GPU \d+: ", text)[1:]
    for number, gpu in enumerate(gpus):
        links = gpu["nvlink"]
        shown = re.findall(r"Link \d+: ([\d.]+) GB/s", blocks[number]) if number < len(blocks) else []
        speed = f"{links['speed_mb_per_s'] / 1000:.3f}"
        check(f"nvlink -s GPU {number}", shown, [speed] * (links["count"] - len(links["down"])))


def main():
    program = sys.argv[1]
    node = pathlib.Path(os.environ["GPU_SIMULATOR_NODE"])
    resolved = json.loads((node / "scenario/scenario.json").read_text())
    scenario = resolved["base"]
    gpus = [gpu for gpu in scenario["gpus"] if gpu["visible_to"]["nvml"] and not gpu["lost"]]
    check_list(program, gpus)
    check_table(program, scenario, gpus)
    check_csv(program, scenario, gpus)
    check_topology(program, gpus)
    check_links(program, gpus)
    shown = ElementTree.fromstring(nvidia_smi(program, "-q", "-x"))
    check("-q -x number of GPUs", int(shown.findtext("attached_gpus")), len(gpus))
    capture = CAPTURES / f"{resolved['name']}.nvidia-smi-q.xml"
    if capture.exists():
        check_against_capture(shown, ElementTree.parse(capture).getroot())
    for difference in differences:
        print(difference)
    verdict = f"{len(differences)} differences" if differences else f"nvidia-smi agrees on {len(gpus)} GPUs"
    print(f"{resolved['name']}: {verdict}")
    sys.exit(1 if differences else 0)


main()
