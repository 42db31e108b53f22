"""moto's server, with what it lacks: CreateImage with tags for the snapshots, as Packer sends it; a RunInstances that is
repeated and starts nothing more, as in EC2; and one request at a time, since nothing guards its models."""

import sys
import threading

from moto.ec2.models.amis import AmiBackend
from moto.ec2.models.instances import InstanceBackend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import main
from werkzeug.exceptions import InternalServerError

create_image_without_snapshots = AmiBackend.create_image
start_instances = InstanceBackend.run_instances
answer_beside_others = DomainDispatcherApplication.__call__
one_at_a_time = threading.Lock()
reservations = {}


def create_image(self, instance_id, name, description, tag_specifications):
    of_image = [it for it in tag_specifications if it["ResourceType"] != "snapshot"]
    return create_image_without_snapshots(self, instance_id, name, description, of_image)


def run_instances(self, image_id, count, user_data, security_group_names, **kwargs):
    """The SDKs repeat a request without an answer with the token of the first time, and get what that one started.

    The very first answer is lost, so that every run sees it happen.
    """
    token = kwargs["client_token"]
    if token in reservations:
        return reservations[token]
    first = not reservations
    reservations[token] = start_instances(self, image_id, count, user_data, security_group_names, **kwargs)
    if first:
        raise InternalServerError("the answer is lost")
    return reservations[token]


def answer(self, environ, start_response):
    with one_at_a_time:
        return answer_beside_others(self, environ, start_response)


AmiBackend.create_image = create_image
InstanceBackend.run_instances = run_instances
DomainDispatcherApplication.__call__ = answer
main(sys.argv[1:])
