"""The kernel's workspace, as a batch run sees it: through the kernel session's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gateway.bridge import bridge

if TYPE_CHECKING:
    from gateway.session.runner import KernelSession


class Workspace(Protocol):
    """Where a kernel's files lie. Paths are relative to the workspace, with slashes."""

    async def put_file(self, path: str, data: bytes, mode: int) -> None:
        """Write one file, folders included."""

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        """Read one file; raises from gateway.errors when it is larger."""

    async def list_files(self, globs: Sequence[str]) -> list[dict[str, Any]]:
        """Matching files as `{"path", "size", "mode"}`; what a guest says, so hostile."""


class SessionWorkspace:
    """A kernel session's workspace; the session lives on the bridge's loop, callers do not."""

    def __init__(self, session: KernelSession) -> None:
        self._session = session

    async def put_file(self, path: str, data: bytes, mode: int) -> None:
        await bridge().run(self._session.put_file(path, data, mode))

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        return await bridge().run(self._session.get_file(path, max_bytes))

    async def list_files(self, globs: Sequence[str]) -> list[dict[str, Any]]:
        return await bridge().run(self._session.list_files(globs))
