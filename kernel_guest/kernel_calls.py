"""The calls of the gateway: a table from operation to handler.

Calls arrive in the order of their lane.  Those on files are carried out at once, so
that pieces of a file keep their order; those that wait for a process run as tasks.
Each call is answered exactly once, on the lane it came on, with a result or with
`{"code", "message"}`.  A handler's own error becomes that answer; anything else is a
bug, is logged with its trace, and is answered as `internal`.

At most `_MAX_RUNNING` calls run at a time; more are answered with `too_many_calls`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from kernel_guest.checkpoint import Checkpointer
from kernel_guest.shared.errors import SharedError
from kernel_guest.shared.messages import LinkMessage, reply
from kernel_guest.supervisor import KernelRefused, KernelSupervisor, StartArguments
from kernel_guest.workspace import Workspace

__all__ = ["KernelCalls"]

log = logging.getLogger(__name__)

_MAX_RUNNING = 64
_MAX_SIGNAL = 64
_DEFAULT_GRACE_S = 1.0

Args = Mapping[str, Any]
Result = dict[str, Any] | tuple[dict[str, Any], bytes]
"""The result, with the blob that goes along if there is one."""

Handler = Callable[[Args, bytes], Result | Awaitable[Result]]


class KernelCalls:
    """Answers calls; knows the workspace and the checkpointer only after `/run`."""

    def __init__(
        self,
        supervisor: KernelSupervisor,
        emit: Callable[[LinkMessage], None],
        consumed: Callable[[LinkMessage], None],
    ) -> None:
        self._supervisor = supervisor
        self._emit = emit
        self._consumed = consumed
        self._workspace: Workspace | None = None
        self._checkpointer: Checkpointer | None = None
        self._tasks: set[asyncio.Future[Result]] = set()
        self._handlers: dict[str, Handler] = {
            "start": self._start,
            "restart": self._restart,
            "interrupt": self._interrupt,
            "signal": self._signal,
            "shutdown": self._shutdown,
            "put_file": self._put_file,
            "get_file": self._get_file,
            "list_files": self._list_files,
            "checkpoint": self._checkpoint,
            "activity": self._activity,
        }

    def __repr__(self) -> str:
        return f"<KernelCalls running={len(self._tasks)}>"

    def begin(self, workspace: Workspace, checkpointer: Checkpointer) -> None:
        """`/run` happened."""
        self._workspace, self._checkpointer = workspace, checkpointer

    def handle(self, message: LinkMessage) -> None:
        """A CALL message came over the link."""
        try:
            value = message.json()
        except SharedError as error:
            log.warning("call without meaning dropped: %s", error)
            self._consumed(message)
            return
        call_id, op, args = value.get("id"), value.get("op"), value.get("args")
        if type(call_id) is not int or not isinstance(args, dict):
            log.warning("call without id or arguments dropped")
            self._consumed(message)
            return
        self._begin(message, call_id, str(op), args)

    async def close(self) -> None:
        """Cancel what runs."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, message: LinkMessage, call_id: int, op: str, args: Args) -> None:
        handler = self._handlers.get(op)
        try:
            if handler is None:
                raise KernelRefused("unknown_call", f"No call {op[:40]!a}.")
            if len(self._tasks) >= _MAX_RUNNING:
                raise KernelRefused("too_many_calls", f"{_MAX_RUNNING} calls are running.")
            outcome = handler(args, message.blob)
        except Exception as error:
            self._answer(message, call_id, error)
            return
        if isinstance(outcome, dict | tuple):
            self._answer(message, call_id, outcome)
            return
        task = asyncio.ensure_future(outcome)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, message, call_id))

    def _done(self, message: LinkMessage, call_id: int, task: asyncio.Future[Result]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return  # the agent ends, and the link with it
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        self._answer(message, call_id, task.result() if error is None else error)

    def _answer(self, message: LinkMessage, call_id: int, outcome: Result | Exception) -> None:
        self._consumed(message)
        if isinstance(outcome, Exception):
            self._emit(reply(call_id, None, _error_of(outcome), lane=message.lane))
            return
        result, blob = outcome if isinstance(outcome, tuple) else (outcome, b"")
        self._emit(reply(call_id, result, None, blob, lane=message.lane))

    # --- handlers

    def _start(self, args: Args, _blob: bytes) -> Awaitable[Result]:
        return self._supervisor.start(_start_arguments(args))

    def _restart(self, args: Args, _blob: bytes) -> Awaitable[Result]:
        grace_s = args.get("grace_s", _DEFAULT_GRACE_S)
        if not isinstance(grace_s, int | float):
            raise KernelRefused("bad_request", "grace_s must be seconds.")
        return self._supervisor.restart(_start_arguments(args), float(grace_s))

    def _interrupt(self, _args: Args, _blob: bytes) -> Awaitable[Result]:
        return self._supervisor.interrupt()

    def _signal(self, args: Args, _blob: bytes) -> Awaitable[Result]:
        number = args.get("signum")
        if type(number) is not int or not 0 <= number <= _MAX_SIGNAL:
            raise KernelRefused("bad_request", f"signum must be 0 to {_MAX_SIGNAL}.")
        return self._supervisor.signal(number)

    def _shutdown(self, args: Args, _blob: bytes) -> Awaitable[Result]:
        return self._supervisor.shutdown(now=args.get("now") is True)

    def _put_file(self, args: Args, blob: bytes) -> Result:
        return self._files().put(args, blob)

    def _get_file(self, args: Args, _blob: bytes) -> Result:
        return self._files().get(args)

    def _list_files(self, args: Args, _blob: bytes) -> Awaitable[Result]:
        return asyncio.to_thread(self._files().list, args)

    async def _checkpoint(self, _args: Args, _blob: bytes) -> Result:
        if self._checkpointer is None:
            raise KernelRefused("not_running", "The machine has not been given an identity yet.")
        return (await self._checkpointer.save()).as_json()

    def _activity(self, _args: Args, _blob: bytes) -> Result:
        return self._supervisor.activity()

    def _files(self) -> Workspace:
        if self._workspace is None:
            raise KernelRefused("not_running", "The machine has not been given an identity yet.")
        return self._workspace


def _start_arguments(args: Args) -> StartArguments:
    """Check types; what the texts mean is checked where they are used."""
    key, name = args.get("key"), args.get("kernel_name")
    env, extra = args.get("env") or {}, args.get("extra_arguments") or []
    scheme, cwd = args.get("signature_scheme", "hmac-sha256"), args.get("cwd") or ""
    if not isinstance(key, str) or not isinstance(scheme, str) or not isinstance(cwd, str):
        raise KernelRefused("bad_request", "key, signature_scheme and cwd must be text.")
    if name is not None and not isinstance(name, str):
        raise KernelRefused("bad_request", "kernel_name must be text or null.")
    if not isinstance(env, dict) or not _all_text([*env, *env.values()]):
        raise KernelRefused("bad_request", "env must map text to text.")
    if not isinstance(extra, list) or not _all_text(extra):
        raise KernelRefused("bad_request", "extra_arguments must be a list of text.")
    return StartArguments(key, scheme, name, env, tuple(extra), cwd)


def _all_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _error_of(error: Exception) -> dict[str, str]:
    if isinstance(error, SharedError):
        return {"code": error.code, "message": str(error)}
    if isinstance(error, OSError):
        return {"code": "os_error", "message": error.strerror or type(error).__name__}
    log.error("a call failed", exc_info=error)
    return {"code": "internal", "message": type(error).__name__}
