"""What can go wrong in a batch run: one sentence, the right exit code, no machine left.

The faults are ordered from the local service or caused from outside, as an operator would.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import nbformat
import pytest

from gateway.local import client
from tests.e2e.sandbox import Sandbox, sandbox
from tests.e2e.service import (
    assert_nothing_left,
    clear_faults,
    machine_states,
    microvms,
    order_fault,
)
from tests.support.waiting import wait_until

#: A cell that says that it runs, and then does nothing for long.
#: The line has a second to arrive before the marker says that the cell is in its middle.
LONG_CELL = """import time
print('begun', flush=True)
time.sleep(1)
open('begun', 'w').close()
time.sleep(600)"""
#: A command has this long to notice, save and terminate its machine.
END_LIMIT_S = 40


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        run(made, made.notebook("1"))  # so that the image of this environment exists
        yield made


@pytest.fixture(autouse=True)
def nothing_left(box: Sandbox) -> Iterator[None]:
    yield
    clear_faults(box)
    assert_nothing_left(box)


def sentence(done: Any, code: int) -> str:
    """The last line of the command's errors; there is no traceback before it."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    return str(done.stderr.rstrip().splitlines()[-1])


def run(box: Sandbox, *arguments: object, **env: str) -> Any:
    inside = replace(box, environment={**box.environment, **env})
    return inside.run(
        "jupyter-microvm", "run", *map(str, arguments), "--output-dir", "out", check=False
    )


class LongRun:
    """A run that is in the middle of its second cell."""

    def __init__(self, box: Sandbox, *options: str, cell: str = LONG_CELL) -> None:
        self.box = box
        marker = box.folder / "begun"
        marker.unlink(missing_ok=True)
        path = box.notebook("print('kept')", cell, name="long.ipynb")
        self.process = box.popen(
            "jupyter-microvm", "run", str(path), "--output-dir", "out", *options,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        wait_until(marker.exists, within_s=60, what="the second cell runs")
        (self.machine,) = {m for m, s in machine_states(box).items() if s == "RUNNING"}

    def end(self) -> Any:
        stdout, stderr = self.process.communicate(timeout=END_LIMIT_S)
        return subprocess.CompletedProcess(
            (), self.process.returncode, stdout.decode(), stderr.decode()
        )

    def saved(self) -> list[str]:
        notebook = nbformat.read(self.box.folder / "out" / "long.ipynb", as_version=4)
        return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_terminates(box: Sandbox, number: int) -> None:
    running = LongRun(box)
    running.process.send_signal(number)
    done = running.end()
    assert sentence(done, 130) == "long.ipynb: Interrupted in cell 2 of 2."
    assert running.saved() == ["kept\n", "begun\n"]
    assert machine_states(box)[running.machine] == "TERMINATED"


def test_ctrl_c_twice_in_a_terminal_still_terminates(box: Sandbox) -> None:
    running = LongRun(box, cell=LONG_CELL.replace("time.sleep(600)", "exec('while True: pass')"))
    os.killpg(running.process.pid, signal.SIGINT)
    os.killpg(running.process.pid, signal.SIGINT)
    assert sentence(running.end(), 130) == "long.ipynb: Interrupted in cell 2 of 2."
    assert machine_states(box)[running.machine] == "TERMINATED"


def test_a_kernel_that_dies(box: Sandbox) -> None:
    done = run(box, box.notebook("print('kept')", "import os; os.kill(os.getpid(), 9)"))
    said = sentence(done, 3)
    assert said == (
        "test.ipynb: The kernel died in cell 2 of 2: its process was killed (SIGKILL), "
        "which often means that memory ran out."
    )
    kept = nbformat.read(box.folder / "out" / "test.ipynb", as_version=4).cells[0].outputs[0].text
    assert kept == "kept\n"


def test_a_machine_that_is_terminated_from_outside(box: Sandbox) -> None:
    running = LongRun(box)
    microvms(box).terminate_microvm(microvmIdentifier=running.machine)
    said = sentence(running.end(), 3)
    assert f"The kernel died in cell 2 of 2: machine {running.machine} is gone (" in said
    assert running.saved() == ["kept\n", "begun\n"]


def test_a_machine_that_crashes(box: Sandbox) -> None:
    running = LongRun(box)
    order_fault(box, "kill-machine", microvm_id=running.machine)
    said = sentence(running.end(), 3)
    assert f"The kernel died in cell 2 of 2: machine {running.machine} is gone (" in said


def test_a_service_that_the_run_itself_started_survives_ctrl_c(box: Sandbox) -> None:
    client.stop(box.state_dir)
    running = LongRun(box)
    os.killpg(running.process.pid, signal.SIGINT)
    assert sentence(running.end(), 130) == "long.ipynb: Interrupted in cell 2 of 2."
    assert machine_states(box)[running.machine] == "TERMINATED"


def test_a_teardown_that_the_service_does_not_confirm(box: Sandbox) -> None:
    running = LongRun(box)
    order_fault(box, "api-html-502", times=100)
    running.process.send_signal(signal.SIGINT)
    done = running.end()
    clear_faults(box)
    microvms(box).terminate_microvm(microvmIdentifier=running.machine)
    assert done.returncode == 130
    said = done.stderr.rstrip().splitlines()[-2]
    assert said.startswith("long: terminate_microvm failed on the service's side"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("api-402", "quota is full"),
        ("api-429", "throttled"),
        ("api-capacity", "no capacity"),
        ("api-html-502", "failed on the service's side"),
        ("credentials-expired", "AWS credentials"),
        ("run-hook", "Run lifecycle hook returned HTTP status 500"),
    ],
)
def test_a_launch_that_the_service_refuses(box: Sandbox, fault: str, words: str) -> None:
    order_fault(box, fault, times=50)
    done = run(box, box.notebook("1"), JUPYTER_MICROVM_LAUNCH_TIMEOUT_S="3")
    assert words in sentence(done, 3)


ABSENT = "arn:aws:lambda:us-east-1:000000000000:microvm-image:absent"


def _as_aws(box: Sandbox, **changes: str) -> dict[str, str]:
    """The environment of somebody who configured an image, at the address of this service."""
    info = client.read_info(box.state_dir)
    assert info is not None
    return {
        "JUPYTER_MICROVM_IMAGE_ARN": ABSENT,
        "JUPYTER_MICROVM_ENDPOINT_URL": info.endpoint_url,
        "AWS_ACCESS_KEY_ID": info.access_key_id,
        "AWS_SECRET_ACCESS_KEY": info.secret_access_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, 3, "cannot be used"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, 3, "AWS credentials"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, 3, "AWS credentials"),
        ({"JUPYTER_MICROVM_AWS_PROFILE": "absent"}, 2, "absent"),
        ({"JUPYTER_MICROVM_IMAGE_ARN": ABSENT.replace("us-east-1", "eu-north-9")}, 3, "eu-north-9"),
        ({"JUPYTER_MICROVM_ENDPOINT_URL": "http://127.0.0.1:9"}, 3, "Cannot reach"),
        ({"JUPYTER_MICROVM_IMAGE_ARN": "kernels"}, 2, "image_arn"),
    ],
)
def test_a_configuration_that_cannot_work(
    box: Sandbox, changes: dict[str, str], code: int, words: str
) -> None:
    done = run(box, box.notebook("1"), **_as_aws(box, **changes))
    assert words in sentence(done, code)


def test_a_signal_while_the_machine_is_launched() -> None:
    with sandbox(["launch_delay_s=20"]) as box:
        path = box.notebook("1")
        command = ["jupyter-microvm", "run", str(path), "--output-dir", "out"]
        process = box.popen(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_until(lambda: machine_states(box), within_s=60, what="a machine was asked for")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=END_LIMIT_S)
        assert process.returncode == 130
        assert b"Interrupted before the first cell." in stderr
        assert_nothing_left(box)
        assert not (box.folder / "out").exists()
