"""An account on moto as terraform/modules/validation-instance leaves it, and what is in it afterwards.

`prepare` prints the ids of an AMI, a subnet and a bystander's instance; `list` prints every instance and volume;
`user-data ID` prints what an instance was given; `stray-volume` makes a volume that outlived the instance of its run;
`run-sweeper FILE` executes the state machine of that module at noon of 2026-01-01 and prints what became of instances by
their deadline.
"""

import base64
import json
import os
import sys
import time
import urllib.request

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


def stray_volume():
    tags = [{"Key": RUN, "Value": "killed"}]
    specification = [{"ResourceType": "volume", "Tags": tags}]
    ec2.create_volume(AvailabilityZone="eu-central-1a", Size=1, TagSpecifications=specification)


def run_sweeper(definition):
    request = urllib.request.Request(
        os.environ["AWS_ENDPOINT_URL"] + "/moto-api/config",
        data=json.dumps({"stepfunctions": {"execute_state_machine": True}}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()
    image = ec2.describe_instances()["Reservations"][0]["Instances"][0]["ImageId"]

    def launch(**extra):
        tags = [{"Key": key, "Value": value} for key, value in extra.items()]
        specifications = [{"ResourceType": "instance", "Tags": tags}] if tags else []
        answer = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=specifications)
        return answer["Instances"][0]["InstanceId"]

    deadline = "gpu-bringup.dev/terminate-after"
    launched = {
        "passed": launch(**{RUN: "a", deadline: "2026-01-01T11:59:59Z"}),
        "ahead": launch(**{RUN: "b", deadline: "2026-01-01T12:00:01Z"}),
        "unreadable": launch(**{RUN: "c", deadline: "tomorrow"}),
        # With a deadline tag and not launched by us it is kept by the role's policy, which moto does not enforce.
        "of others": launch(**{"team": "b"}),
    }
    text = open(definition).read()
    for name, value in {"partition": "aws", "run_tag": RUN, "deadline_tag": deadline}.items():
        text = text.replace("${" + name + "}", value)
    states = boto3.client("stepfunctions")
    role = "arn:aws:iam::123456789012:role/sweeper"
    machine = states.create_state_machine(name="sweeper", definition=text, roleArn=role)["stateMachineArn"]
    execution = states.start_execution(stateMachineArn=machine, input=json.dumps({"now": "2026-01-01T12:00:00Z"}))
    for _ in range(300):
        answer = states.describe_execution(executionArn=execution["executionArn"])
        if answer["status"] != "RUNNING":
            break
        time.sleep(0.1)
    if answer["status"] != "SUCCEEDED":
        raise SystemExit(f"{answer['status']}: {answer.get('cause')}")
    became = {
        instance["InstanceId"]: instance["State"]["Name"]
        for reservation in ec2.describe_instances()["Reservations"]
        for instance in reservation["Instances"]
    }
    print(json.dumps({name: became[instance] for name, instance in launched.items()}))


commands = {
    "prepare": prepare,
    "list": everything,
    "user-data": user_data,
    "stray-volume": stray_volume,
    "run-sweeper": run_sweeper,
}
commands[sys.argv[1]](*sys.argv[2:])
