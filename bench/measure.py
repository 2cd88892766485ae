"""One measurement each: a kernel name in, a number out. Run as a script for a fresh process.

    python bench/measure.py start KERNEL_NAME      one start in this process, milliseconds as JSON

Clients are jupyter_client's own blocking ones. ``wait_for_ready`` is not used where time is taken:
it adds a fixed 200 ms of draining to both sides.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jupyter_client

#: A kernel that has not answered by then is broken; the run stops with an error.
TIMEOUT_S = 120.0
ROUND_TRIPS = 200
WARM_UP_TRIPS = 20
DISPLAY_BYTES = 20_000_000
LINES = 5_000

Client = Any


def start_ms(kernel_name: str) -> float:
    """From ``start_kernel`` to the reply of the first cell; the kernel is shut down afterwards."""
    begun_s = time.perf_counter()
    manager = jupyter_client.KernelManager(kernel_name=kernel_name)
    manager.start_kernel()
    try:
        client = manager.client()
        client.start_channels()
        msg_id = client.execute("6 * 7")
        _await_reply(client, msg_id)
        return (time.perf_counter() - begun_s) * 1_000
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@contextmanager
def kernel(kernel_name: str) -> Iterator[Client]:
    """A ready client of a running kernel."""
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name=kernel_name)
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def round_trips_ms(client: Client, count: int = ROUND_TRIPS) -> list[float]:
    """Request to reply and idle, one after the other."""
    for _ in range(WARM_UP_TRIPS):
        _round_trip(client)
    return [_round_trip(client) for _ in range(count)]


def _round_trip(client: Client) -> float:
    begun_s = time.perf_counter()
    msg_id = client.execute("x=1")
    _await_reply(client, msg_id)
    _messages_until_idle(client, msg_id)
    return (time.perf_counter() - begun_s) * 1_000


def display_s(client: Client) -> float:
    """A text display of ``DISPLAY_BYTES`` until idle. Raises when it is not all there."""
    code = "from IPython.display import display\n"
    code += f"display({{'text/plain': 'x' * {DISPLAY_BYTES}}}, raw=True)"
    begun_s = time.perf_counter()
    messages = _messages_until_idle(client, client.execute(code))
    taken_s = time.perf_counter() - begun_s
    sizes = [len(m["content"]["data"]["text/plain"]) for m in messages if "data" in m["content"]]
    if sizes != [DISPLAY_BYTES]:
        raise RuntimeError(f"the display came as {sizes}")
    return taken_s


def lines_s(client: Client) -> tuple[float, int]:
    """``LINES`` flushed lines until idle: (seconds, how many lines arrived)."""
    begun_s = time.perf_counter()
    msg_id = client.execute(f"for i in range({LINES}): print(i, flush=True)")
    messages = _messages_until_idle(client, msg_id)
    taken_s = time.perf_counter() - begun_s
    text = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")
    return taken_s, len(text.split())


def _await_reply(client: Client, msg_id: str) -> None:
    while True:
        reply = client.get_shell_msg(timeout=TIMEOUT_S)
        if reply["parent_header"].get("msg_id") == msg_id:
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"the cell failed: {reply['content']}")
            return


def _messages_until_idle(client: Client, msg_id: str) -> list[dict[str, Any]]:
    """iopub messages of this request, without the closing idle."""
    messages: list[dict[str, Any]] = []
    while True:
        message = client.get_iopub_msg(timeout=TIMEOUT_S)
        if message["parent_header"].get("msg_id") != msg_id:
            continue
        if message["content"].get("execution_state") == "idle":
            return messages
        messages.append(message)


if __name__ == "__main__":
    print(json.dumps(start_ms(sys.argv[2])))
