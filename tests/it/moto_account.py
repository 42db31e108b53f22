"""An account on moto as terraform/modules/validation-instance leaves it, and what is in it afterwards.

`prepare` prints the ids of an AMI, a subnet and a bystander's instance; `list` prints every instance and volume;
`user-data ID` prints what an instance was given.
"""

import base64
import json
import sys

import boto3

ec2, iam, ssm = boto3.client("ec2"), boto3.client("iam"), boto3.client("ssm")
RUN = "gpu-bringup.dev/validate-ami"


def prepare():
    subnets = sorted(subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"])
    group = ec2.create_security_group(GroupName="validation", Description="validation")["GroupId"]
    trust = {"Version": "2012-10-17", "Statement": []}
    iam.create_role(RoleName="validation", AssumeRolePolicyDocument=json.dumps(trust))
    iam.create_instance_profile(InstanceProfileName="validation")
    iam.add_role_to_instance_profile(InstanceProfileName="validation", RoleName="validation")
    foundation = {
        "subnet_ids": subnets[:2],
        "security_group_id": group,
        "instance_profile_name": "validation",
        "kms_key_arn": None,
    }
    ssm.put_parameter(Name="/gpu-bringup/validation-instance", Value=json.dumps(foundation), Type="String")
    # moto forgets the architecture of an image that is registered with it, so it is one of those that it comes with.
    named = [{"Name": "name", "Values": ["al2023-ami-ecs-hvm-*"]}, {"Name": "architecture", "Values": ["x86_64"]}]
    ami = ec2.describe_images(Filters=named)["Images"][0]["ImageId"]
    # Somebody else's instance, which nothing here may touch.
    bystander = ec2.run_instances(ImageId=ami, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    print(json.dumps({"ami": ami, "subnets": subnets[:2], "security_group": group, "bystander": bystander}))


def tags(resource):
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}


def everything():
    instances = [
        {
            "id": instance["InstanceId"],
            "type": instance["InstanceType"],
            "state": instance["State"]["Name"],
            "subnet": instance.get("SubnetId"),
            "groups": [group["GroupId"] for group in instance.get("SecurityGroups", [])],
            "profile": instance.get("IamInstanceProfile", {}).get("Arn", ""),
            "tokens": instance.get("MetadataOptions", {}).get("HttpTokens"),
            "lifecycle": instance.get("InstanceLifecycle"),
            "tags": tags(instance),
        }
        for reservation in ec2.describe_instances()["Reservations"]
        for instance in reservation["Instances"]
    ]
    for instance in instances:
        answer = ec2.describe_instance_attribute(
            InstanceId=instance["id"], Attribute="instanceInitiatedShutdownBehavior"
        )
        instance["on_shutdown"] = answer["InstanceInitiatedShutdownBehavior"].get("Value")
    volumes = [
        {"id": volume["VolumeId"], "encrypted": volume["Encrypted"], "type": volume["VolumeType"], "tags": tags(volume)}
        for volume in ec2.describe_volumes()["Volumes"]
    ]
    print(json.dumps({"instances": instances, "volumes": volumes}))


def user_data(instance):
    answer = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
    print(base64.b64decode(answer["UserData"]["Value"]).decode(), end="")


{"prepare": prepare, "list": everything, "user-data": user_data}[sys.argv[1]](*sys.argv[2:])
