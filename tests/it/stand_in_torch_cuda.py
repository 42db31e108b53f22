"""torch.cuda of the stand-in."""
import ctypes

import torch

from . import nccl


class _Properties(object):
    pass


def init():
    torch._cuda()


def is_available():
    try:
        return torch._cuda().count > 0
    except Exception:
        return False


def device_count():
    try:
        return torch._cuda().count
    except Exception:
        return 0


def get_device_capability(index):
    driver = torch._cuda()
    values = []
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    for attribute in (75, 76):
        value = ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), driver.device(index))
        values.append(value.value)
    return tuple(values)


def get_device_properties(index):
    driver = torch._cuda()
    device = driver.device(index)
    name = ctypes.create_string_buffer(128)
    driver.call("cuDeviceGetName", name, ctypes.c_int(128), device)
    uuid = (ctypes.c_ubyte * 16)()
    driver.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
    memory = ctypes.c_size_t()
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    text = "".join("%02x" % it for it in uuid)
    properties = _Properties()
    properties.name = name.value.decode()
    properties.uuid = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    properties.major, properties.minor = get_device_capability(index)
    properties.total_memory = memory.value
    return properties


def get_arch_list():
    return ["sm_80", "sm_90"] if is_available() else []


def synchronize(index=None):
    torch._cuda().use(index or 0)
