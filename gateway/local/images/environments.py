"""A virtual environment from a code artifact's requirements and wheels.

The process engine cannot run a Dockerfile, so it takes from the zip what makes
the Python side of the image: `requirements.txt` at the root and every wheel.
What else the Dockerfile does (system packages, files copied elsewhere) is not
done here; the docs say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from gateway.local.behaviours import implements
from gateway.local.interfaces import ImageBuildError

BUILD_LIMIT_S = 900.0
_TAIL_BYTES = 64 * 1024
_ERROR_CHARS = 300

Progress = Callable[[str], None]


@implements("build-failed-text")
def build_failure(detail: str) -> ImageBuildError:
    """LM 9.2's recorded text, and what we know about the cause."""
    return ImageBuildError(f"The container image build failed. {detail}".strip())


@implements("zip-needs-dockerfile")
def find_inputs(unpacked: Path) -> tuple[Path | None, list[Path]]:
    """The requirements file, if any, and the wheels.  Raises ImageBuildError."""
    if not (unpacked / "Dockerfile").is_file():
        raise ImageBuildError("ARCHIVE_MISSING_DOCKERFILE: there is no Dockerfile at its root.")
    requirements = unpacked / "requirements.txt"
    wheels = sorted(unpacked.rglob("*.whl"))
    return requirements if requirements.is_file() else None, wheels


async def make_environment(
    unpacked: Path, prefix: Path, log_path: Path, progress: Progress
) -> None:
    """Make `prefix` and install into it.  Raises ImageBuildError.

    Everything that pip and venv print goes to `log_path`; `progress` is told what
    is going on in a few words.
    """
    requirements, wheels = find_inputs(unpacked)
    pip = _bundled_pip()
    try:
        async with asyncio.timeout(BUILD_LIMIT_S):
            progress("Making a virtual environment.")
            options = ["--without-pip"] if pip else []
            venv = [sys.executable, "-I", "-m", "venv", *options, str(prefix)]
            await _run(venv, unpacked, log_path)
            progress(f"Installing {_described(requirements, wheels)}.")
            arguments = [str(wheel) for wheel in [*wheels, *([pip] if pip else [])]]
            if requirements is not None:
                arguments += ["-r", str(requirements)]
            if arguments:
                command = [*_pip(prefix, pip), "--find-links", str(unpacked), *arguments]
                await _run(command, unpacked, log_path)
    except TimeoutError:
        raise build_failure(f"It took longer than {BUILD_LIMIT_S:g} s.") from None


def _bundled_pip() -> Path | None:
    """The wheel from which ensurepip installs pip, if our own pip can do that instead.

    `venv` alone spends five seconds of processor time on it, ours one.  None where
    this environment has no pip, or the distribution keeps the wheel elsewhere.
    """
    if importlib.util.find_spec("pip") is None or importlib.util.find_spec("ensurepip") is None:
        return None
    import ensurepip

    folder = Path(ensurepip.__file__).parent / "_bundled"
    return next(iter(sorted(folder.glob("pip-*.whl"))), None)


def _pip(prefix: Path, bundled: Path | None) -> list[str]:
    python = str(prefix / "bin" / "python")
    runner = [sys.executable, "-I", "-m", "pip", "--python", python]
    if bundled is None:
        runner = [python, "-I", "-m", "pip"]
    # What is imported is compiled by the template; the rest never needs it.
    return [
        *runner, "install", "--no-compile", "--no-input", "--disable-pip-version-check",
        "--no-warn-script-location",
    ]  # fmt: skip


def _described(requirements: Path | None, wheels: Sequence[Path]) -> str:
    lines = requirements.read_text(errors="replace").splitlines() if requirements else []
    count = sum(1 for line in lines if line.strip() and not line.lstrip().startswith(("#", "-")))
    return f"{count} requirements and {len(wheels)} wheels"


async def _run(command: Sequence[str], folder: Path, log_path: Path) -> None:
    """Run to the end in its own process group, which never outlives this call."""
    with _private_log(log_path) as sink:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
    try:
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        raise build_failure(_last_error(log_path))


def _private_log(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _last_error(log_path: Path) -> str:
    """pip's own sentence about what went wrong."""
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    chosen = errors[-1] if errors else next((line for line in reversed(lines) if line), "")
    return chosen[:_ERROR_CHARS]
