"""The trial of a new image: a throwaway machine whose build hooks are called (LM 7.2).

On the real service `ready` runs where the image is built and `validate` on a test
machine from its snapshot.  A template cannot answer HTTP, so here one throwaway
machine answers both.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from gateway.local.behaviours import implements
from gateway.local.hooks import HookOutcome, HookResult, poll_hook
from gateway.local.interfaces import (
    Engine,
    EngineError,
    ImageBuildError,
    ImageSpec,
    MachineSpec,
    RunningMachine,
)

LOG_FILE = "trial.log"
#: Longest folder that leaves room for a socket's name; macOS's own TMPDIR is longer.
FOLDER_BYTES = 50


@implements("ready-and-validate-at-build")
async def try_out(engine: Engine, image: ImageSpec) -> None:
    """Call the enabled build hooks.  Raises ImageBuildError; nothing is left either way."""
    wanted = {"ready": image.hooks.ready_s, "validate": image.hooks.validate_s}
    limits = {name: limit_s for name, limit_s in wanted.items() if limit_s is not None}
    if not limits:
        return
    async with _throwaway(engine, image) as machine:
        for name, limit_s in limits.items():
            outcome = await poll_hook(machine, image.hooks.port, name, timeout_s=limit_s)
            if not outcome.ok:
                raise ImageBuildError(hook_failure(name, outcome, limit_s))


@contextlib.asynccontextmanager
async def _throwaway(engine: Engine, image: ImageSpec) -> AsyncIterator[RunningMachine]:
    spec = MachineSpec(f"microvm-{uuid.uuid4()}", image, _short_folder(), image.folder / LOG_FILE)
    try:
        machine = await engine.start(spec)
    except EngineError as error:
        raise ImageBuildError(str(error)) from error
    try:
        yield machine
    finally:
        await engine.kill(machine)


def _short_folder() -> Path:
    """A folder that does not exist yet, in the user's temporary folder or in /tmp."""
    name = f"mvm-{os.getuid()}-{secrets.token_hex(6)}"
    folder = Path(tempfile.gettempdir(), name)
    return folder if len(os.fsencode(folder)) <= FOLDER_BYTES else Path("/tmp", name)  # noqa: S108


@implements("build-hook-failure-text")
def hook_failure(name: str, outcome: HookOutcome, limit_s: float) -> str:
    """The build's stateReason (the text of the time-out is recorded, LM 9.2)."""
    title = name.capitalize()
    match outcome.result:
        case HookResult.TIMED_OUT:
            return f"{title} hook invocation timed out after {iso_duration(limit_s)}"
        case HookResult.ANSWERED:
            return f"{title} hook invocation returned HTTP status {outcome.status}"
        case HookResult.UNREACHABLE:
            return f"{title} hook invocation failed: the connection broke before an answer"


def iso_duration(seconds: float) -> str:
    """`PT5M`, `PT1M30S`, `PT0.5S`: the form that the service uses."""
    minutes, rest = divmod(seconds, 60)
    parts = [f"{minutes:.0f}M"] if minutes else []
    if rest or not minutes:
        parts.append(f"{rest:g}S")
    return "PT" + "".join(parts)
