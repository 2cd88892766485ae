"""nbclient, with the three things changed that a batch run needs otherwise.

1. Signals and the kernel's life are ours: nbclient's own handlers start a clean-up that
   nobody awaits, and would overrule the ones that terminate the machine.
2. Consecutive stream messages become one output, as in every front-end; nbclient keeps each
   message apart, which makes 20 000 flushed lines 20 000 outputs. Text is gathered in a
   list and joined once, because adding to a string of 200 MB 20 000 times takes an hour.
3. The first readiness check waits for what it needs (a reply and the iopub subscription)
   and not for 200 ms of silence, as jupyter_client's does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from queue import Empty
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode

# A subscription that is not yet in place misses the first answers: ask again after this.
_READY_RETRY_S = 1.0


class BatchClient(NotebookClient):
    """Executes the cells of one notebook in a kernel that somebody else starts and ends."""

    def __init__(self, notebook: NotebookNode, manager: Any, **options: Any) -> None:
        super().__init__(notebook, km=manager, **options)
        self._parts: list[str] | None = None
        self._stream: NotebookNode | None = None

    @asynccontextmanager
    async def async_setup_kernel(self, **kwargs: Any) -> AsyncIterator[None]:
        """Nothing to set up: `runner.py` has started the kernel and will end it."""
        yield

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        """Add a message to a cell's outputs; text of the stream on top joins it."""
        if self._continues_stream(outs, msg):
            assert self._parts is not None
            self._parts.append(msg["content"]["text"])
            return self._stream
        self.join_streams()
        added: NotebookNode | None = super().output(outs, msg, display_id, cell_index)
        if added is not None and added.output_type == "stream":
            self._stream, self._parts = added, [added.text]
        return added

    def _continues_stream(self, outs: list[NotebookNode], msg: dict[str, Any]) -> bool:
        return bool(
            msg["msg_type"] == "stream"
            and self._stream is not None
            and outs
            and outs[-1] is self._stream
            and self._stream.name == msg["content"]["name"]
            and not self.clear_before_next_output
            and not self.output_hook_stack[msg["parent_header"].get("msg_id")]
        )

    def join_streams(self) -> None:
        """Write the gathered text into its output; called before anybody reads the notebook."""
        if self._stream is not None and self._parts is not None:
            self._stream["text"] = "".join(self._parts)
        self._stream = self._parts = None

    async def async_execute_cell(self, *args: Any, **kwargs: Any) -> NotebookNode:
        """One cell, with its text joined however it ended."""
        try:
            return await super().async_execute_cell(*args, **kwargs)
        finally:
            self.join_streams()


async def wait_until_ready(client: AsyncKernelClient, timeout_s: float) -> str:
    """Return when a request was answered on shell and its `idle` was seen on iopub.

    Returns the kernel's language, as it spells it. Raises TimeoutError, or nbclient's
    DeadKernelError when the kernel ended meanwhile.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await _ask_kernel_info(client)
            except Empty:
                if not await client.is_alive():
                    raise DeadKernelError("Kernel died") from None


async def _ask_kernel_info(client: AsyncKernelClient) -> str:
    request = client.kernel_info()
    reply = await client.get_shell_msg(timeout=_READY_RETRY_S)
    while reply["parent_header"].get("msg_id") != request:
        reply = await client.get_shell_msg(timeout=_READY_RETRY_S)
    while not _is_idle_for(await client.get_iopub_msg(timeout=_READY_RETRY_S), request):
        pass
    return str(reply["content"].get("language_info", {}).get("name", ""))


def _is_idle_for(message: dict[str, Any], request: str) -> bool:
    return bool(
        message["msg_type"] == "status"
        and message["content"]["execution_state"] == "idle"
        and message["parent_header"].get("msg_id") == request
    )
