"""`jupyter microvm image build --create`: from the zip to a kernel in that image.

Long: the local service installs the pinned requirements from the package index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import boto3
import nbformat
import pytest
from moto.server import ThreadedMotoServer

from gateway.local import client
from tests.e2e.sandbox import Sandbox, sandbox
from tests.e2e.service import assert_nothing_left

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket `images` at a server of moto's; its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="images")
    yield address
    server.stop()


@pytest.fixture(scope="module")
def box(s3: str) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", s3)  # what the service of the sandbox inherits
        with sandbox() as made:
            info = client.read_info(made.state_dir)
            assert info is not None
            environment = {**made.environment, **info.environment(), "AWS_ENDPOINT_URL_S3": s3}
            yield replace(made, environment=environment)


def test_an_image_of_our_own_libraries(box: Sandbox) -> None:
    (box.folder / "mine.txt").write_text("six\n")
    done = box.run(
        "jupyter-microvm", "image", "build", "--create", "--name=kernels", "--json",
        "--requirements=mine.txt",
    )  # fmt: skip
    arn = json.loads(done.stdout)["image_arn"]
    assert arn == "arn:aws:lambda:us-east-1:000000000000:microvm-image:kernels"
    assert "kernels  CREATED" in done.stderr
    (box.folder / "project").mkdir()
    path = box.notebook("import six, sys; print(sys.prefix)", name="project/test.ipynb")
    configured = replace(box, environment={**box.environment, "JUPYTER_MICROVM_IMAGE_ARN": arn})
    configured.run("jupyter-microvm", "run", str(path), "--output-dir", "out")
    (output,) = nbformat.read(box.folder / "out" / "test.ipynb", as_version=4).cells[0].outputs
    assert "images/kernels-1.0" in output.text
    assert_nothing_left(box)


def test_an_image_by_way_of_s3(box: Sandbox) -> None:
    done = box.run(
        "jupyter-microvm", "image", "build", "--create", "--name=by-s3", "--bucket=images/guests",
        "--build-role=arn:aws:iam::000000000000:role/build", "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["image_arn"].endswith(":by-s3")


def test_an_image_that_cannot_be_built_says_why(box: Sandbox) -> None:
    (box.folder / "broken.txt").write_text("no-such-distribution-of-ours==1\n")
    done = box.run(
        "jupyter-microvm", "image", "build", "--create", "--name=broken",
        "--requirements=broken.txt", check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "Image broken was not built" in done.stderr
    assert "Traceback" not in done.stderr
