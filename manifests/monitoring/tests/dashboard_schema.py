#!/usr/bin/env python3
"""Holds a dashboard against Grafana's own schema, as its foundation SDK has it.

The SDK ignores what it does not know, so the dashboard is read, written again and compared: every field that is lost or changed on the way is
none of Grafana's, or has a value of another type.
"""

import json
import sys

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def differences(ours, read, path):
    if isinstance(ours, dict):
        if not isinstance(read, dict):
            yield f"{path} is no object in Grafana's schema"
            return
        for key, value in ours.items():
            if key in read:
                yield from differences(value, read[key], f"{path}.{key}")
            # What equals its default is not written again.
            elif value not in (None, False, "", [], {}):
                yield f"{path}.{key} is unknown"
    elif isinstance(ours, list):
        if not isinstance(read, list) or len(ours) != len(read):
            yield f"{path} is no such list in Grafana's schema"
            return
        for index, (one, other) in enumerate(zip(ours, read)):
            yield from differences(one, other, f"{path}[{index}]")
    elif ours != read:
        yield f"{path} is {ours!r}, Grafana reads {read!r}"


def main():
    plugins.register_default_plugins()
    with open(sys.argv[1], encoding="utf-8") as file:
        ours = json.load(file)
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    found = list(differences(ours, read, "dashboard"))
    for line in found:
        print(line)
    return 1 if found else 0


sys.exit(main())
