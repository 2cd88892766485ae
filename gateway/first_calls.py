"""The first service calls of a fresh process, made on the other core. See ``ask``.

Importing botocore and making its client is 150 ms of processor time, a third of a first start, and
it has to be over before RunMicrovm can be sent. Threads do not help: imports hold the interpreter's
lock. So a short-lived child does both, with the same client code (``control.make_client``), while
this process imports what comes after RunMicrovm; later calls use a client of this process.

Nothing depends on the child. Where it cannot be had (one core, Windows), does not answer in time or
meets any error, ``ask`` returns None and the caller makes the same call itself, with the same
clientToken: a launch that the child did send is answered with the machine that it made (LM 3.5).

The access key travels through a pipe and is nowhere else. The child ends with its pipe, after
``LIFE_S`` at the latest.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

__all__ = ["begin", "end", "pending", "serve", "warm"]

LIFE_S = 60.0
# A launch takes seconds in AWS (LM 12); beyond this something is wrong with the child.
ANSWER_S = 30.0
MOST_ANSWER_BYTES = 256 * 1024

# Set to 0 to make even the first calls in this process.
SWITCH = "JUPYTER_MICROVM_FIRST_CALLS"

CHILD_CODE = "from gateway.first_calls import serve; serve()"


class _Child(NamedTuple):
    pid: int
    owner: int
    to: int
    answers: int


_child: _Child | None = None
_lock = threading.Lock()


def begin() -> None:
    """Start the child, unless this process has a botocore already. Who calls: the provisioner's
    module when it is imported, which is when a kernel is about to be started.
    """
    global _child
    wanted = "botocore.session" not in sys.modules and (os.cpu_count() or 1) > 1
    wanted = wanted and os.environ.get(SWITCH) != "0"
    if _child is None and wanted and hasattr(os, "posix_spawn") and sys.executable:
        try:
            _child = _spawn()
        except OSError:  # no process to be had: this one makes its calls itself
            _child = None


def _spawn() -> _Child:
    its_in, to = os.pipe()
    answers, its_out = os.pipe()
    nothing = os.open(os.devnull, os.O_WRONLY)
    command = [sys.executable, "-P", "-c", CHILD_CODE]
    moves = [(os.POSIX_SPAWN_DUP2, *pair) for pair in ((its_in, 0), (its_out, 1), (nothing, 2))]
    try:
        pid = os.posix_spawn(command[0], command, dict(os.environ), file_actions=moves)
    except OSError:
        os.close(to)
        os.close(answers)
        raise
    finally:
        for fd in (its_in, its_out, nothing):
            os.close(fd)
    return _Child(pid, os.getpid(), to, answers)


def pending() -> bool:
    """Whether ``ask`` may still be answered."""
    return _child is not None and _child.owner == os.getpid()


def ask(access: Mapping[str, Any], operation: str, parameters: Mapping[str, Any]) -> Any:
    """The service's answer, or None: make the call yourself. Blocking; on a worker."""
    with _lock:
        child = _child
        if child is None or not pending():
            return None
        try:
            os.write(child.to, _request(access, operation, parameters))
            answer = json.loads(_line(child.answers), object_hook=_decode)
        except (OSError, ValueError, TypeError, TimeoutError):
            answer = None
    if answer is None or not answer.get("ok"):
        end()
        return None
    return answer["result"]


def _request(
    access: Mapping[str, Any], operation: str | None, parameters: Mapping[str, Any]
) -> bytes:
    request = {"access": access, "operation": operation, "parameters": parameters}
    return json.dumps(request).encode() + b"\n"


def warm(access: Mapping[str, Any]) -> None:
    """Tell the child which client it will need. Best effort; on a worker."""
    with _lock:
        if _child is not None and pending():
            try:
                os.write(_child.to, _request(access, None, {}))
            except OSError:
                return  # it is gone: ``ask`` finds out and says so


def _line(fd: int) -> bytes:
    deadline_s = time.monotonic() + ANSWER_S
    data = bytearray()
    while not data.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            raise TimeoutError("no answer")
        chunk = os.read(fd, 65536)
        if not chunk or len(data) > MOST_ANSWER_BYTES:
            raise OSError("the child ended")
        data += chunk
    return bytes(data)


@atexit.register
def end() -> None:
    """Done with the child: this process has a client of its own. Idempotent."""
    global _child
    if not pending():
        return
    # Not under a call that is on its way: its pipe's number could be another file's by then.
    if not _lock.acquire(timeout=ANSWER_S):
        return
    child, _child = _child, None
    _lock.release()
    if child is None:
        return
    os.close(child.to)
    os.close(child.answers)
    try:
        os.kill(child.pid, 9)
        os.waitpid(child.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return  # reaped by somebody who waits for all children


# -- in the child ------------------------------------------------------------------


def serve() -> None:
    """Answer the requests of the parent, a line each, until its pipe closes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to judge
    signal.setitimer(signal.ITIMER_REAL, LIFE_S)
    import gc

    gc.disable()
    import botocore.session  # noqa: F401 -- before the first request comes

    from gateway.profiles import ServiceAccess
    from gateway.service_client import client_for

    for line in sys.stdin:
        request = json.loads(line)
        try:
            client = client_for(ServiceAccess(**request["access"]))
            if request["operation"] is None:
                continue
            result = getattr(client, request["operation"])(**request["parameters"])
            result.pop("ResponseMetadata", None)
            answer: dict[str, Any] = {"ok": True, "result": result}
        except Exception:  # whatever it is, the parent meets it again and reports it
            answer = {"ok": False}
        print(json.dumps(answer, default=_encode), flush=True)


def _encode(value: object) -> dict[str, float]:
    if isinstance(value, datetime):
        return {"epoch_s": value.timestamp()}
    raise TypeError(type(value).__name__)


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() == {"epoch_s"}:
        return datetime.fromtimestamp(value["epoch_s"], UTC)
    return value
