"""The embedded default: where the service is, and an image from this very environment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway import embedded
from gateway.bridge import bridge
from gateway.clock import ManualClock, SystemClock
from gateway.control import Control, ImageInfo, LaunchRequest, MachineInfo
from gateway.errors import (
    ImageNotFound,
    LaunchFailed,
    LocalServiceTrouble,
    RequestRefused,
    TimedOut,
)
from gateway.profiles import Profile
from tests.gateway.session_kit import Kit, running_service

ARN = "arn:aws:lambda:us-east-1:000000000000:microvm-image:env-a-b"


def test_the_arn_names_prefix_python_and_what_is_installed(tmp_path: Path) -> None:
    site = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = site / "site-packages"
    site.mkdir(parents=True)
    first = embedded.environment_arn(str(tmp_path))
    assert first == embedded.environment_arn(str(tmp_path))
    (site / "somecode").mkdir()
    assert embedded.environment_arn(str(tmp_path)) == first
    (site / "thing-1.0.dist-info").mkdir()
    second = embedded.environment_arn(str(tmp_path))
    assert second != first
    assert second.rpartition("-")[0] == first.rpartition("-")[0]  # same place, other set
    assert embedded.environment_arn() not in (first, second)
    assert len(first.rpartition(":")[2]) <= 64


def test_access_by_configuration_needs_no_local_service() -> None:
    profile = Profile(
        image_arn="arn:aws:lambda:eu-west-1:1:microvm-image:x", region="eu-west-1", aws_profile="p"
    )
    access = embedded.access_of(profile)
    assert (access.region, access.endpoint_url, access.aws_profile) == ("eu-west-1", None, "p")
    assert embedded.known_access(profile) == access


def test_looking_does_not_start_a_service(tmp_path: Path) -> None:
    assert embedded.known_access(Profile(local_state_dir=str(tmp_path / "none"))) is None
    embedded.prewarm_default(Profile(local_state_dir=str(tmp_path / "none")))
    bridge().submit(lambda: None).result(60)
    assert not (tmp_path / "none").exists()


def test_a_state_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(LocalServiceTrouble):
        embedded.access_of(Profile(local_state_dir=str(blocker / "x")))


def test_sessions_of_one_place_share_a_control() -> None:
    profile = Profile(local_state_dir="/nowhere/a")
    assert embedded.control_for(profile) is embedded.control_for(
        Profile(local_state_dir="/nowhere/a")
    )
    assert embedded.control_for(profile) is not embedded.control_for(Profile())


def test_two_first_kernels_at_once_make_one_image_and_both_run() -> None:
    with running_service() as kit:

        async def steps(kit: Kit) -> None:
            async with kit.kernel() as one, kit.kernel(start=False) as two:
                await two.session.start(two.request)
                assert (await one.execute("1")).value == (await two.execute("1")).value

        async def both(kit: Kit) -> None:
            async with kit.kernel(start=False) as one, kit.kernel(start=False) as two:
                await asyncio.gather(*(each.session.start(each.request) for each in (one, two)))
                code = "import sys; sys.prefix"
                assert (await one.execute(code)).value == repr(sys.prefix)
                assert (await two.execute(code)).value == repr(sys.prefix)
            images = await kit.control.call("list_microvm_images")
            assert len(images["items"]) == 1

        kit.run(both)
        kit.run(steps)


def test_a_service_that_ended_is_started_again() -> None:
    from gateway.local import client

    with running_service() as kit:

        async def once(kit: Kit) -> None:
            async with kit.kernel() as kernel:
                assert (await kernel.execute("1")).value == "1"

        kit.run(once)
        assert client.stop(kit.state_dir)
        kit.run(once)


class ScriptedControl(Control):
    """Answers of image operations as a test wants them."""

    def __init__(
        self, states: list[ImageInfo | Exception], create: Exception | None = None
    ) -> None:
        super().__init__(lambda: pytest.fail("no access needed"), SystemClock())
        self.states = states
        self.create = create
        self.runs = 0

    async def renew(self) -> None:
        pass

    async def run_microvm(self, request: LaunchRequest) -> MachineInfo:
        self.runs += 1
        if self.runs == 1:
            raise ImageNotFound(ARN, "No active version found")
        return MachineInfo("microvm-1", "PENDING")

    async def create_image(self, **parameters: Any) -> ImageInfo:
        if self.create is not None:
            raise self.create
        return ImageInfo(ARN, "CREATING")

    async def get_image(self, image_arn: str) -> ImageInfo:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    async def build_failure(self, image_arn: str) -> str:
        return "The container image build failed."


def launch_with(control: Control, advance_s: float) -> MachineInfo:
    async def steps() -> MachineInfo:
        clock = ManualClock()
        work = asyncio.ensure_future(embedded.launch(control, LaunchRequest(ARN, "{}"), clock))
        for _ in range(int(advance_s)):
            await clock.advance(1.0)
        return await work

    return bridge().call(steps)


def test_the_image_is_waited_for() -> None:
    states = [ImageInfo(ARN, "CREATING"), ImageInfo(ARN, "CREATED", "1.0")]
    assert launch_with(ScriptedControl(list(states)), 5).microvm_id == "microvm-1"
    exists = RequestRefused("x", "ValidationException", "A MicroVM image ... already exists")
    assert launch_with(ScriptedControl(list(states), exists), 5).microvm_id == "microvm-1"


def test_an_image_that_cannot_be_made_is_said() -> None:
    with pytest.raises(LaunchFailed, match="build failed"):
        launch_with(ScriptedControl([ImageInfo(ARN, "CREATE_FAILED")]), 5)
    with pytest.raises(TimedOut):
        launch_with(ScriptedControl([ImageInfo(ARN, "CREATING")]), 130)
    refused = RequestRefused("x", "ValidationException", "something else")
    with pytest.raises(RequestRefused):
        launch_with(ScriptedControl([], refused), 1)
