"""moto's server, with one thing that it lacks: CreateImage with tags for the snapshots, as Packer sends it."""

import sys

from moto.ec2.models.amis import AmiBackend
from moto.server import main

create_image_without_snapshots = AmiBackend.create_image


def create_image(self, instance_id, name, description, tag_specifications):
    of_image = [it for it in tag_specifications if it["ResourceType"] != "snapshot"]
    return create_image_without_snapshots(self, instance_id, name, description, of_image)


AmiBackend.create_image = create_image
main(sys.argv[1:])
