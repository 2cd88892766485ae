"""The platform's lifecycle hooks (LM 7), answered by the agent's process.

Each is a POST that succeeds with 200.  They are reachable from any process of the
machine and look the same as the platform's own calls (LM 7.1), so none may do lasting
harm when notebook code calls it:

* `ready`      200 once the template is set up, 503 before: ask again.
* `validate`   starts a throwaway kernel and ends it, so that the snapshot's pages which
               a start needs are known and a broken image fails its build.
* `run`        the first one gives the machine its identity; all later ones are 409.
* `suspend`    finishes the checkpoint.  Nothing else changes: no state says "we are
               asleep", so a call without a freeze behind it has undone itself when it
               returns, and the agent has never stopped working.
* `resume`     fresh seeds and a note of the clock's jump.  Harmless at any time.
* `terminate`  one last checkpoint, best effort.  Nothing ends: the platform ends the
               machine, a forged call does not.

All but `run` may come any number of times, at the same time too.

**When a checkpoint does not get done.**  A suspend hook that does not answer 200 keeps
the machine awake (LM 7.2).  Out of time: 503, because what was copied so far stays and
the next attempt needs less; this converges.  A store that refuses (full, gone): 200 and
the reason in the body, for a machine that never sleeps would cost money for ever, and
its files are in its frozen disk all the same.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Protocol

from tornado.web import Application

from kernel_guest.checkpoint import CheckpointRefused, Saved
from kernel_guest.http_basics import JsonHandler, NotFoundHandler, log_request
from kernel_guest.identity import AlreadyRunning, refresh_entropy
from kernel_guest.shared.errors import SharedError

__all__ = ["HOOK_PATH", "HookTarget", "make_hook_application"]

log = logging.getLogger(__name__)

HOOK_PATH = "/aws/lambda-microvms/runtime/v1"

# Time limits of hooks are set on the image (image/): 10 s for suspend and resume, 5 s
# for terminate, 60 s for validate.  Ours are below them, so that the answer is ours.
SUSPEND_BUDGET_S = 8.0
TERMINATE_BUDGET_S = 4.0
VALIDATE_BUDGET_S = 50.0

_MAX_ID_CHARS = 256


class HookTarget(Protocol):
    """What the hooks act on; the agent."""

    @property
    def ready(self) -> bool:
        """Whether the template is set up."""

    def run(self, microvm_id: str, payload: str) -> dict[str, Any]:
        """Take the identity; raises AlreadyRunning, or a SharedError for a bad payload."""

    async def validate(self, timeout_s: float) -> dict[str, Any]:
        """Start and end a throwaway kernel; raises SharedError."""

    async def checkpoint(self, timeout_s: float) -> Saved | None:
        """Save the workspace; None if there is nothing to save to."""

    def resumed(self) -> None:
        """The machine has slept, or somebody says so."""


class _Hook(JsonHandler):
    """Common part: POST only, the target."""

    def initialize(self, target: HookTarget) -> None:
        """tornado passes what the route holds."""
        self.target = target


class _Ready(_Hook):
    def post(self) -> None:
        if self.target.ready:
            self.answer({"ready": True})
        else:
            self.refuse(503, "not_ready", "The template is being set up.")


class _Validate(_Hook):
    async def post(self) -> None:
        try:
            self.answer(await self.target.validate(VALIDATE_BUDGET_S))
        except SharedError as error:
            log.error("validate failed: %s", error)
            self.refuse(500, error.code, str(error))


class _Run(_Hook):
    def post(self) -> None:
        try:
            microvm_id, payload = _run_body(self.request.body)
            self.answer(self.target.run(microvm_id, payload))
        except AlreadyRunning as error:
            self.refuse(409, "already_running", str(error))
        except SharedError as error:
            self.refuse(400, error.code, str(error))


class _Suspend(_Hook):
    async def post(self) -> None:
        try:
            saved = await self.target.checkpoint(SUSPEND_BUDGET_S)
        except CheckpointRefused as error:
            if error.code == "out_of_time":
                self.refuse(503, error.code, str(error))
            else:
                self.answer(_failed(error.code, str(error)))
        except OSError as error:
            self.answer(_failed("store_failed", error.strerror or type(error).__name__))
        else:
            self.answer(_saved(saved))


class _Resume(_Hook):
    def post(self) -> None:
        self.target.resumed()
        self.answer({})


class _Terminate(_Hook):
    async def post(self) -> None:
        try:
            saved = await self.target.checkpoint(TERMINATE_BUDGET_S)
        except (CheckpointRefused, OSError) as error:
            self.answer(_failed("not_saved", str(error)))
        else:
            self.answer(_saved(saved))


class ClockWatch:
    """How far the clocks have drifted apart: the time slept, where one of them stopped."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def jump_s(self) -> float:
        """Change of wall clock against monotonic clock since the last look."""
        before, self._offset_s = self._offset_s, time.time() - time.monotonic()
        return self._offset_s - before


def after_resume(clocks: ClockWatch) -> None:
    """What sleep breaks in this process.

    Where the platform stops the monotonic clock our timers just continue; where it
    jumps (LM 8 has both) they fire early, and every one of them is a deadline whose
    early end does no harm.  Kernels go on with their own state: nothing of theirs is
    shared with another machine, since they were forked after `/run`.
    """
    refresh_entropy()
    log.info("resumed, wall clock moved %.1f s against monotonic", clocks.jump_s())


def make_hook_application(target: HookTarget) -> Application:
    """The application for the hook listener."""
    routes = {
        "ready": _Ready,
        "validate": _Validate,
        "run": _Run,
        "suspend": _Suspend,
        "resume": _Resume,
        "terminate": _Terminate,
    }
    return Application(
        [(f"{HOOK_PATH}/{name}", hook, {"target": target}) for name, hook in routes.items()],
        default_handler_class=NotFoundHandler,
        log_function=log_request,
    )


class BadRunBody(SharedError):  # noqa: N818 - named like its tree: what happened
    """The body of `/run` is not what the platform sends."""

    code = "bad_request"


def _run_body(body: bytes) -> tuple[str, str]:
    """The machine's id and the payload; the payload is parsed a second time (LM 7.2)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRunBody("The body is not JSON.") from error
    if not isinstance(value, dict):
        raise BadRunBody("The body is not an object.")
    microvm_id, payload = value.get("microvmId"), value.get("runHookPayload")
    if not isinstance(microvm_id, str) or not 0 < len(microvm_id) <= _MAX_ID_CHARS:
        raise BadRunBody("microvmId must be text.")
    if not isinstance(payload, str):
        raise BadRunBody("runHookPayload must be text.")
    return microvm_id, payload


def _saved(saved: Saved | None) -> dict[str, Any]:
    return {"checkpoint": None if saved is None else saved.as_json()}


def _failed(code: str, message: str) -> dict[str, Any]:
    log.error("checkpoint failed: %s", message)
    return {"checkpoint": None, "error": {"code": code, "message": message}}
