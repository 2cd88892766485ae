"""`jupyter microvm image build`: the guest's image, as a zip and, if asked, in the service."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from traitlets import Bool, Enum, List, Unicode

from gateway.batch.notebooks import write_atomically
from gateway.batch.progress import format_elapsed
from gateway.bridge import bridge
from gateway.cli.app import USAGE, MicroVMCommand
from gateway.clock import SystemClock
from gateway.config import load_gateway
from gateway.control import Control
from gateway.embedded import access_of
from gateway.errors import UsageError
from gateway.image_build import build_image_zip, image_folder
from gateway.image_publish import (
    LOCAL_POLL_INTERVAL_S,
    POLL_INTERVAL_S,
    ImageRequest,
    create_image,
    managed_base_image,
)
from gateway.image_upload import region_of_environment, upload_to_s3
from gateway.profiles import ServiceAccess

DEFAULT_OUTPUT = "microvm-kernel-guest.zip"
LOCAL_ROLE = "arn:aws:iam::000000000000:role/local-build"

_ALIASES: dict[Any, str] = {
    **MicroVMCommand.aliases,
    "output": "BuildImage.output",
    "source": "BuildImage.source",
    "requirements": "BuildImage.requirements",
    "name": "BuildImage.image_name",
    "bucket": "BuildImage.bucket",
    "build-role": "BuildImage.build_role",
    "base-image": "BuildImage.base_image",
    "memory": "BuildImage.memory",
    "architecture": "BuildImage.architecture",
}
_FLAGS = {
    **MicroVMCommand.flags,
    "create": ({"BuildImage": {"create": True}}, "Also create the image in the service."),
    "json": ({"BuildImage": {"json_output": True}}, "Print one JSON document instead of text."),
}


class BuildImage(MicroVMCommand):
    """Make the zip that a guest image is built from, and create the image if asked."""

    name = "jupyter-microvm-image-build"
    description = """Build the guest's image.

    Writes a zip with the Dockerfile, the pinned requirements and the guest's wheel; the same
    sources give the same bytes. With --create the image is also created: in AWS when --bucket
    says where the zip goes, else in the local service of this computer.
    """
    examples = """
    jupyter microvm image build --output guest.zip
    jupyter microvm image build --create --name kernels --requirements requirements.txt
    jupyter microvm image build --create --name kernels --bucket my-bucket/images --build-role arn:aws:iam::123456789012:role/microvm-build
    """  # noqa: E501  # a command is copied whole

    output = Unicode(DEFAULT_OUTPUT, help="The zip to write.").tag(config=True)
    source = Unicode("", help="Folder with another Dockerfile and requirements.txt.").tag(
        config=True
    )
    requirements = List(Unicode(), help="Requirement files to add; may be repeated.").tag(
        config=True
    )
    create = Bool(False, help="Also create the image in the service.").tag(config=True)
    image_name = Unicode("", help="Name of the image to create.").tag(config=True)
    bucket = Unicode("", help="BUCKET or BUCKET/PREFIX for the zip; AWS only.").tag(config=True)
    build_role = Unicode("", help="ARN of the role that builds; AWS only.").tag(config=True)
    base_image = Unicode("", help="ARN of the base image; default: the managed AL2023.").tag(
        config=True
    )
    memory = Enum(
        ["512", "1024", "2048", "4096", "8192"], "2048", help="Baseline memory in MiB (LM 9.1)."
    ).tag(config=True)
    architecture = Enum(["ARM_64", "X86_64"], "ARM_64", help="Processor of the machines.").tag(
        config=True
    )
    json_output = Bool(False, help="Print one JSON document instead of text.").tag(config=True)

    aliases = _ALIASES
    flags = _FLAGS

    def start(self) -> None:
        """Write the zip, then create the image if asked."""
        super().start()
        self._check_arguments()
        folder = Path(self.source) if self.source else image_folder()
        data = build_image_zip(folder, [Path(path) for path in self.requirements])
        path = Path(self.output).absolute()
        write_atomically(path, lambda stream: stream.write(data))
        facts: dict[str, Any] = {
            "zip": str(path),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        if self.create:
            facts["image_arn"] = asyncio.run(self._create(path, facts["sha256"]))
        self._report(facts)

    def _check_arguments(self) -> None:
        if self.extra_args:
            raise UsageError(f"Unexpected argument {self.extra_args[0]!r}; see --help.")
        if self.create and not self.image_name:
            raise UsageError("--create needs --name for the image.")
        if self.image_name and not self.create:
            raise UsageError("--name is for --create; without it only the zip is written.")
        if self.create and self.bucket and not self.build_role:
            raise UsageError("--bucket means AWS, which needs --build-role ARN as well (LM 9.1).")

    async def _create(self, path: Path, digest: str) -> str:
        access = self._aws_access() if self.bucket else self._local_access()
        uri = path.as_uri()
        if self.bucket:
            uri = await asyncio.to_thread(upload_to_s3, path, self.bucket, digest, access)
        request = ImageRequest(
            name=self.image_name,
            artifact_uri=uri,
            base_image_arn=self.base_image or managed_base_image(access.region),
            build_role_arn=self.build_role or LOCAL_ROLE,
            memory_mib=int(self.memory),
            architecture=self.architecture,
        )
        return await self._create_with(access, request)

    async def _create_with(self, access: ServiceAccess, request: ImageRequest) -> str:
        clock = SystemClock()
        control = Control(lambda: access, clock)
        interval_s = POLL_INTERVAL_S if self.bucket else LOCAL_POLL_INTERVAL_S
        show = _progress_printer(request.name)
        return await bridge().run(
            create_image(control, request, clock, show, poll_interval_s=interval_s)
        )

    def _aws_access(self) -> ServiceAccess:
        profile = load_gateway(self.config).profile()
        region = profile.region or region_of_environment(profile.aws_profile)
        return ServiceAccess(region, profile.endpoint_url, aws_profile=profile.aws_profile)

    def _local_access(self) -> ServiceAccess:
        profile = load_gateway(self.config).profile()
        return access_of(replace(profile, image_arn=None))

    def _report(self, facts: dict[str, Any]) -> None:
        if self.json_output:
            print(json.dumps(facts, indent=2))
            return
        print(f"zip     {facts['zip']} ({facts['bytes'] / 1e3:.0f} kB)")
        print(f"sha256  {facts['sha256']}")
        if arn := facts.get("image_arn"):
            print(f"image   {arn}")
            print(f"Use it: c.MicroVMGateway.image_arn = {arn!r} in jupyter_microvm_config.py.")


def _progress_printer(name: str) -> Callable[[str, float], None]:
    shown: list[str] = []

    def show(state: str, seconds: float) -> None:
        # A line for each change; on a terminal the waiting line is redrawn in place.
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{name}  {state}  {format_elapsed(seconds)}", end="", file=sys.stderr)
            if state not in ("CREATING", "UPDATING"):
                print(file=sys.stderr)
        elif shown[-1:] != [state]:
            print(f"{name}  {state}  {format_elapsed(seconds)}", file=sys.stderr)
        shown.append(state)
        sys.stderr.flush()

    return show


_SUBCOMMANDS = {"build": (BuildImage, "Make the zip, and create the image if asked")}


class ImageApp(MicroVMCommand):
    """`jupyter microvm image`: only dispatches."""

    name = "jupyter-microvm-image"
    description = "Build the guest's image."
    examples = "    jupyter microvm image build --output guest.zip"
    subcommands = _SUBCOMMANDS

    def start(self) -> None:
        """Say what there is."""
        super().start()
        self.print_help()
        self.exit(USAGE)
