"""Which function answers which operation of the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.local.api import image_operations as images
from gateway.local.api import machine_operations as machines
from gateway.local.api.context import Context
from gateway.local.api.parsing import Members

Handler = Callable[[Context, Members], Awaitable[dict[str, Any]]]

HANDLERS: Mapping[str, Handler] = {
    "RunMicrovm": machines.run_microvm,
    "GetMicrovm": machines.get_microvm,
    "ListMicrovms": machines.list_microvms,
    "SuspendMicrovm": machines.suspend_microvm,
    "ResumeMicrovm": machines.resume_microvm,
    "TerminateMicrovm": machines.terminate_microvm,
    "CreateMicrovmAuthToken": machines.create_auth_token,
    "CreateMicrovmShellAuthToken": machines.create_shell_auth_token,
    "CreateMicrovmImage": images.create_image,
    "UpdateMicrovmImage": images.update_image,
    "GetMicrovmImage": images.get_image,
    "ListMicrovmImages": images.list_images,
    "DeleteMicrovmImage": images.delete_image,
    "GetMicrovmImageVersion": images.get_version,
    "ListMicrovmImageVersions": images.list_versions,
    "UpdateMicrovmImageVersion": images.update_version,
    "DeleteMicrovmImageVersion": images.delete_version,
    "GetMicrovmImageBuild": images.get_build,
    "ListMicrovmImageBuilds": images.list_builds,
    "ListManagedMicrovmImages": images.list_managed_images,
    "ListManagedMicrovmImageVersions": images.list_managed_versions,
    "ListTags": images.list_tags,
    "TagResource": images.tag_resource,
    "UntagResource": images.untag_resource,
}
