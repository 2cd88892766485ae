"""From a code artifact to an environment: real venv and pip, no package index."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gateway.local.clock import SystemClock
from gateway.local.images.artifact import (
    Environment,
    LocalZip,
    S3Access,
    S3Zip,
    check_environment,
    fetch,
    parse_artifact,
)
from gateway.local.images.builder import Builder, hook_settings
from gateway.local.interfaces import ImageBuildError
from gateway.local.state import VersionRecord
from tests.local.in_process import ARN, Script, ScriptedEngine, run


def wheel(folder: Path, name: str = "demo") -> tuple[str, bytes]:
    """A wheel of one module, made by hand."""
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}.py", "ANSWER = 42\n")
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n")
    return path.name, path.read_bytes()


def code_zip(folder: Path, *, dockerfile: bool = True, requirements: str = "demo\n") -> Path:
    name, content = wheel(folder)
    path = folder / "code.zip"
    with zipfile.ZipFile(path, "w") as made:
        if dockerfile:
            made.writestr("Dockerfile", "FROM scratch\n")
        made.writestr("requirements.txt", requirements)
        made.writestr(name, content)
    return path


def builder(folder: Path, s3: S3Access | None = None) -> tuple[Builder, ScriptedEngine]:
    engine = ScriptedEngine(Script())
    access = s3 or S3Access(None, "us-east-1")
    return Builder(engine, SystemClock(), folder / "images", access), engine


def version(uri: str, **request: Any) -> VersionRecord:
    members = {"codeArtifact": {"uri": uri}, **request}
    return VersionRecord(f"{ARN}a", "1.0", "PENDING", "INACTIVE", 0.0, members)


def failure(made: Builder, record: VersionRecord) -> str:
    with pytest.raises(ImageBuildError) as caught:
        run(made.build(record, lambda text: None, 0), within_s=60)
    return caught.value.reason


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_a_zip_becomes_an_environment_of_its_own(tmp_path: Path) -> None:
    made, engine = builder(tmp_path)
    seen: list[str] = []
    record = version(code_zip(tmp_path).as_uri())
    prefix = run(made.build(record, seen.append, 0), within_s=100)
    python = prefix / "bin" / "python"
    shown = subprocess.run(
        [python, "-c", "import demo, sys; print(demo.ANSWER, sys.prefix != sys.base_prefix)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == "42 True\n"
    assert (prefix / "bin" / "pip").exists()
    assert seen == [
        "Fetching the code artifact.", "Unpacking the code artifact.",
        "Making a virtual environment.", "Installing 1 requirements and 1 wheels.",
        "Starting the template.",
    ]  # fmt: skip
    assert engine.templates == {(f"{ARN}a", "1.0")}
    log = made.version_folder(record.arn, record.version) / "build.log"
    assert "Successfully installed demo-1.0" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    built = VersionRecord(record.arn, "1.0", "", "", 0.0, record.request, prefix=str(prefix))
    run(made.forget(built))
    assert not prefix.exists()
    assert engine.templates == set()


def test_only_the_build_of_a_zip_is_delayed(tmp_path: Path) -> None:
    """An environment is ACTIVE as soon as its template runs, in every preset."""
    made, _ = builder(tmp_path)
    run(made.build(version(Path(sys.prefix).as_uri()), lambda text: None, 1e6))


def test_a_failing_pip_gives_its_own_sentence(tmp_path: Path) -> None:
    made, engine = builder(tmp_path)
    reason = failure(made, version(code_zip(tmp_path, requirements="nosuchthing==1\n").as_uri()))
    assert reason.startswith("The container image build failed. ERROR: No matching distribution")
    assert engine.templates == set()


def test_a_zip_without_a_dockerfile(tmp_path: Path) -> None:
    made, _ = builder(tmp_path)
    reason = failure(made, version(code_zip(tmp_path, dockerfile=False).as_uri()))
    assert reason.startswith("ARCHIVE_MISSING_DOCKERFILE")


def test_a_file_that_is_no_zip(tmp_path: Path) -> None:
    made, _ = builder(tmp_path)
    (tmp_path / "x.zip").write_bytes(b"no")
    assert failure(made, version((tmp_path / "x.zip").as_uri())).startswith("ARCHIVE_INVALID")


def test_a_cancelled_build_leaves_no_process(tmp_path: Path) -> None:
    made, _ = builder(tmp_path)

    async def scenario() -> None:
        begun = asyncio.Event()

        def progress(text: str) -> None:
            if text.startswith("Making"):
                begun.set()

        record = version(code_zip(tmp_path).as_uri())
        task = asyncio.create_task(made.build(record, progress, 0))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in found.stdout


# -- environments


def test_an_environment_is_used_as_it_is(tmp_path: Path) -> None:
    made, engine = builder(tmp_path)
    prefix = run(made.build(version(Path(sys.prefix).as_uri()), lambda text: None, 0))
    assert prefix == Path(sys.prefix)
    assert engine.script.engine_calls == ["prepare hooks=True"]


@pytest.mark.parametrize("name", ["missing", "empty folder"])
def test_a_folder_that_is_no_environment(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty folder").mkdir()
    reason = failure(builder(tmp_path)[0], version((tmp_path / name).as_uri()))
    assert reason.endswith("is not a Python environment: it has no bin/python that can be run.")


def test_the_forms_of_an_artifact(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    assert parse_artifact(spaced.as_uri()) == Environment(spaced)
    assert parse_artifact(code_zip(tmp_path).as_uri()) == LocalZip(tmp_path / "code.zip")
    assert parse_artifact("s3://bucket/a/b.zip") == S3Zip("bucket", "a/b.zip")
    for uri in ("s3://bucket", "http://x/y", "file://host/x", "relative", "file:relative"):
        with pytest.raises(ImageBuildError):
            parse_artifact(uri)
    with pytest.raises(ImageBuildError):
        check_environment(Environment(tmp_path))


def test_hooks_as_time_limits() -> None:
    settings = hook_settings(
        {
            "port": 8080,
            "microvmImageHooks": {"ready": "ENABLED", "validate": "DISABLED"},
            "microvmHooks": {"run": "ENABLED", "suspend": "ENABLED", "suspendTimeoutInSeconds": 9},
        }
    )
    assert settings.port == 8080
    assert (settings.ready_s, settings.validate_s) == (60, None)
    assert (settings.run_s, settings.suspend_s, settings.resume_s) == (1, 9, None)
    assert hook_settings({}).run_s is None


# -- S3


def test_s3_needs_an_endpoint(tmp_path: Path) -> None:
    reason = failure(builder(tmp_path)[0], version("s3://bucket/key.zip"))
    assert reason.startswith("S3_ACCESS_DENIED")


def test_a_zip_from_s3(tmp_path: Path) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        access = S3Access(f"http://{host}:{port}", "us-east-1")
        client = boto3.client(
            "s3", endpoint_url=access.endpoint_url, region_name="us-east-1",
            aws_access_key_id="x", aws_secret_access_key="x",
        )  # fmt: skip
        client.create_bucket(Bucket="bucket")
        content = code_zip(tmp_path).read_bytes()
        client.put_object(Bucket="bucket", Key="a/key.zip", Body=content)
        client.close()
        fetch(S3Zip("bucket", "a/key.zip"), tmp_path / "fetched.zip", access)
        assert (tmp_path / "fetched.zip").read_bytes() == content
        with pytest.raises(ImageBuildError, match="S3_NOSUCHKEY: s3://bucket/none"):
            fetch(S3Zip("bucket", "none"), tmp_path / "none.zip", access)
    finally:
        server.stop()
    with pytest.raises(ImageBuildError, match="S3_UNREACHABLE"):
        fetch(S3Zip("bucket", "a/key.zip"), tmp_path / "late.zip", access)
