#!/usr/bin/env python3
"""Writes aws-schema.json: argument names and types of the AWS provider, for the resources that our modules use.

    npm pack @cdktf/provider-aws@21.22.1 && tar xzf cdktf-provider-aws-21.22.1.tgz
    ./extract_aws_schema.py package >aws-schema.json

The package is HashiCorp's binding of the provider, generated from its schema. What it cannot tell: whether an optional
argument is also computed (here only `id`, `region` and `tags_all` are), and which values an argument accepts.
The output has the form of `terraform providers schema -json`, so with the provider at hand that command can replace this one.
"""

import json
import pathlib
import re
import sys

RESOURCES = """
    cloudwatch_log_group eks_node_group iam_instance_profile iam_openid_connect_provider iam_policy iam_role
    iam_role_policy iam_role_policy_attachment launch_template placement_group s3_bucket s3_bucket_lifecycle_configuration
    s3_bucket_ownership_controls s3_bucket_policy s3_bucket_public_access_block
    s3_bucket_server_side_encryption_configuration s3_bucket_versioning scheduler_schedule security_group
    sfn_state_machine ssm_parameter vpc_security_group_egress_rule vpc_security_group_ingress_rule
""".split()
DATA_SOURCES = "caller_identity eks_cluster partition region subnet vpc".split()

SIMPLE_TYPES = {
    "String": "string",
    "Number": "number",
    "Boolean": "bool",
    "StringMap": ["map", "string"],
    "NumberMap": ["map", "number"],
    "BooleanMap": ["map", "bool"],
    "List": ["list", "string"],
    "NumberList": ["list", "number"],
}
CLASS = re.compile(r"^class (\w+) extends cdktf\.(\w+) \{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
GETTER = re.compile(
    r"get (\w+)\(\) \{\s+return (cdktf\.Fn\.tolist\()?this\.(?:interpolationForAttribute|get(\w+)Attribute)\('(\w+)'\)"
)
NESTED = re.compile(
    r"// (\w+) - computed: (true|false), optional: (true|false), required: (true|false)\n"
    r"\s+this\.\w+ = new (cdktf\.)?(\w+)\(this, \"\w+\"(?:, (true|false))?\)"
)
# The interface of a block or resource, and one of its members with the argument's name in the link above it.
INTERFACE = re.compile(r"^export interface (\w+)(?: extends [\w.]+)? \{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"#(\w+) \w+#\w+\}(?:(?!\*/).)*?\*/\s+readonly \w+(\??):", re.DOTALL)


class Source:
    """One resource of the package."""

    def __init__(self, folder):
        script = (folder / "index.js").read_text()
        declarations = (folder / "index.d.ts").read_text()
        self.classes = {name: (base, body) for name, base, body in CLASS.findall(script)}
        self.required = {
            name: {argument for argument, optional in MEMBER.findall(body) if not optional}
            for name, body in INTERFACE.findall(declarations)
        }

    def root(self):
        for name, (base, _) in self.classes.items():
            if base in ("TerraformResource", "TerraformDataSource", "TerraformProvider"):
                return name, self.block(name, name + "Config")
        raise SystemExit("no resource in this file")

    def block(self, class_name, interface):
        _, body = self.classes[class_name]
        attributes, blocks = {}, {}
        for member, is_set, kind, name in GETTER.findall(body):
            if not kind:
                raise SystemExit(f"{class_name}.{name}: type unknown")
            kind = SIMPLE_TYPES[kind]
            settable = f"set {member}(value)" in body
            attribute = {"type": ["set", *kind[1:]] if is_set else kind}
            if name in self.required[interface]:
                attribute["required"] = True
            elif settable:
                attribute["optional"] = True
            if not settable or (name in ("id", "region", "tags_all") and "required" not in attribute):
                attribute["computed"] = True
            attributes[name] = attribute
        for name, computed, optional, required, of_cdktf, kind, is_set in NESTED.findall(body):
            computed, optional, required = (text == "true" for text in (computed, optional, required))
            flags = {key: True for key, on in (("computed", computed), ("optional", optional), ("required", required)) if on}
            if of_cdktf:
                attributes[name] = {"type": SIMPLE_TYPES[kind], **flags}
                continue
            many = kind.endswith("List")
            struct = kind.removesuffix("List").removesuffix("OutputReference")
            inner = self.block(struct + "OutputReference", struct)
            nesting = "set" if is_set == "true" else "list"
            if computed:
                attributes[name] = {"type": [nesting, object_type(inner)], **flags}
            elif name == "timeouts":
                blocks[name] = {"nesting_mode": "single", "block": inner}
            else:
                blocks[name] = {"nesting_mode": nesting, "block": inner}
                if required:
                    blocks[name]["min_items"] = 1
                if not many:
                    blocks[name]["max_items"] = 1
        block = {"attributes": attributes}
        if blocks:
            block["block_types"] = blocks
        return block


def object_type(block):
    members = {name: attribute["type"] for name, attribute in block.get("attributes", {}).items()}
    for name, nested in block.get("block_types", {}).items():
        members[name] = [nested["nesting_mode"], object_type(nested["block"])]
    return ["object", members]


def provider(source):
    """The provider's own class has no getters for its arguments, so their types are in what it writes."""
    name = next(name for name, (base, _) in source.classes.items() if base == "TerraformProvider")
    _, body = source.classes[name]
    types = {"string": "string", "number": "number", "boolean": "bool", "stringList": ["list", "string"]}
    attributes = {
        argument: {"type": types[kind], "optional": True}
        for argument, kind in re.findall(
            r"(\w+): \{\s+value: [^\n]+\n\s+isBlock: false,\n\s+type: \"\w+\",\n\s+storageClassType: \"(\w+)\"", body
        )
    }
    tags = {"tags": {"type": ["map", "string"], "optional": True}}
    return {
        "attributes": attributes,
        "block_types": {"default_tags": {"nesting_mode": "list", "max_items": 1, "block": {"attributes": tags}}},
    }


def main():
    library = pathlib.Path(sys.argv[1]) / "lib"
    version = re.search(r"providerVersion: '([\d.]+)'", (library / "placement-group/index.js").read_text())[1]

    def schemas(names, prefix):
        found = {}
        for name in names:
            _, block = Source(library / (prefix + name.replace("_", "-"))).root()
            found["aws_" + name] = {"version": 0, "block": block}
        return found

    document = {
        "format_version": "1.0",
        "provider_version": version,
        "provider_schemas": {
            "registry.terraform.io/hashicorp/aws": {
                "provider": {"version": 0, "block": provider(Source(library / "provider"))},
                "resource_schemas": schemas(RESOURCES, ""),
                "data_source_schemas": schemas(DATA_SOURCES, "data-aws-"),
            }
        },
    }
    json.dump(document, sys.stdout, indent=1, sort_keys=True)
    print()


main()
