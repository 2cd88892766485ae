"""A stock local kernel in place of a MicroVM, so that the batch runner is tested alone.

Its workspace is a folder; `extra_listing` lets a test play a hostile guest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from gateway.batch.host import Listener
from gateway.batch.kernel import make_kernel_manager
from gateway.batch.workspace import Workspace
from gateway.errors import GuestFault


class FolderWorkspace:
    """A workspace that is a folder of this computer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.extra_listing: list[Any] = []

    async def put_file(self, path: str, data: bytes, mode: int) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        data = (self.folder / path).read_bytes()
        if len(data) > max_bytes:
            raise GuestFault(f"{path} is larger than {max_bytes} bytes")
        return data

    async def list_files(self, globs: Sequence[str]) -> list[dict[str, Any]]:
        found = sorted({path for glob in globs for path in self.folder.glob(glob)})
        listed = [
            {
                "path": path.relative_to(self.folder).as_posix(),
                "size": path.stat().st_size,
                "mode": 0o644,
            }
            for path in found
            if path.is_file()
        ]
        return listed + self.extra_listing


class LocalHost:
    """Makes managers of ordinary ipykernel processes; remembers them, so that tests can look."""

    extra_arguments: Sequence[str] = ("--HistoryManager.hist_file=:memory:",)

    def __init__(self, folder: Path, argv: Sequence[str] | None = None) -> None:
        self.files = FolderWorkspace(folder)
        self.managers: list[AsyncKernelManager] = []
        self.provisioners: list[Any] = []
        self._argv = argv or [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

    def make_manager(self) -> AsyncKernelManager:
        spec = KernelSpec(argv=list(self._argv), display_name="local", language="python")
        manager = make_kernel_manager(spec)
        self.managers.append(manager)
        return manager

    def workspace(self, manager: AsyncKernelManager) -> Workspace:
        return self.files

    def machine(self, manager: AsyncKernelManager) -> dict[str, Any]:
        self.provisioners.append(manager.provisioner)
        return {"microvm_id": "microvm-local"}

    def reason(self, manager: AsyncKernelManager) -> str:
        return ""

    def watch(self, manager: AsyncKernelManager, listener: Listener) -> bool:
        return True

    async def confirm_end(self, manager: AsyncKernelManager) -> None:
        return None
