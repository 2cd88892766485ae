"""What a run needs to know of the place where its kernel lives.

A seam with two real users: MicroVMs, and (in tests of the runner) an ordinary local kernel.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from jupyter_client.manager import AsyncKernelManager
from traitlets.config import Config

from gateway.batch.kernel import make_kernel_manager, profile_kernel_spec
from gateway.batch.workspace import SessionWorkspace, Workspace
from gateway.bridge import bridge
from gateway.config import MicroVMGateway
from gateway.errors import UsageError
from gateway.events import Event, EventSink
from gateway.lifecycle import Phase
from gateway.profiles import Profile, UploadLimits
from gateway.session.files import plan_upload

Listener = Callable[[Event], None]


class KernelHost(Protocol):
    """Makes kernel managers and answers questions about their kernels."""

    extra_arguments: Sequence[str]

    def make_manager(self) -> AsyncKernelManager:
        """A manager of a kernel that is not started yet."""

    def workspace(self, manager: AsyncKernelManager) -> Workspace:
        """The files of a started kernel."""

    def machine(self, manager: AsyncKernelManager) -> dict[str, Any]:
        """Facts for the report; empty before a machine exists."""

    def reason(self, manager: AsyncKernelManager) -> str:
        """Why the kernel is gone, as a sentence; empty when nobody knows."""

    def watch(self, manager: AsyncKernelManager, listener: Listener) -> bool:
        """Call `listener` for each lifecycle event, past ones first, on another thread.

        False when there is nothing to watch yet: ask again.
        """

    async def confirm_end(self, manager: AsyncKernelManager) -> None:
        """Return when nothing of the kernel is left, after its manager was told to end it.

        Raises from gateway.errors when that is not certain.
        """


class MicroVMHost:
    """Kernels in MicroVMs of one profile."""

    def __init__(self, profile: Profile, config: Config | None = None) -> None:
        self._spec = profile_kernel_spec(profile.name)
        self._config = config
        # No history file: nothing would read it. nbclient does the same for local kernels. It is
        # an option of IPython's kernel, so not for a profile that names another one.
        self.extra_arguments: Sequence[str] = (
            () if profile.kernel_name else ("--HistoryManager.hist_file=:memory:",)
        )

    def make_manager(self) -> AsyncKernelManager:
        return make_kernel_manager(self._spec, self._config)

    def workspace(self, manager: AsyncKernelManager) -> Workspace:
        return SessionWorkspace(_session(manager))

    def machine(self, manager: AsyncKernelManager) -> dict[str, Any]:
        session = _session(manager)
        microvm_id = session.microvm_id if session is not None else None
        return {"microvm_id": microvm_id} if microvm_id else {}

    def reason(self, manager: AsyncKernelManager) -> str:
        session = _session(manager)
        if session is None:
            return ""
        if session.phase in _MACHINE_ENDS:
            return f"machine {session.microvm_id} is gone ({session.reason})"
        return describe_exit(session.exit_status())

    def watch(self, manager: AsyncKernelManager, listener: Listener) -> bool:
        session = _session(manager)
        if session is not None:
            bridge().post(_subscribe, session.events, listener)
        return session is not None

    async def confirm_end(self, manager: AsyncKernelManager) -> None:
        # A manager's clean-up only logs a termination that the service did not confirm, and a
        # launch that was cancelled is cleaned up behind its back. Releasing twice is harmless.
        session = _session(manager)
        if session is not None:
            await bridge().run(session.release())


# Phases in which the machine has ended without our asking.
_MACHINE_ENDS = frozenset({Phase.LOST, Phase.FAILED})


def describe_exit(status: int | None) -> str:
    """What the exit status of a kernel process says to people; empty while it lives."""
    if status is None:
        return ""
    if status == -signal.SIGKILL:
        return "its process was killed (SIGKILL), which often means that memory ran out"
    if status < 0:
        return f"its process ended by signal {-status}"
    return f"its process ended with status {status}"


def with_workspace(config: Config, settings: MicroVMGateway, profile: str, source: str) -> Config:
    """Configuration in which `profile` has another `workspace_source`.

    Only ever from "folder" to "upload" or "none": it narrows what the profile allows, so nobody
    gains a right by it.
    """
    table = {name: dict(entry) for name, entry in settings.profiles.items()}
    table.setdefault(profile, {})["workspace_source"] = source
    changed = deepcopy(config)
    changed.MicroVMGateway.profiles = table
    return changed


def choose_workspace(
    profile: Profile, folders: Iterable[Path], *, inputs: bool, collect: bool
) -> str:
    """The `workspace_source` of a run that brings files along or back.

    Such a run should leave nothing in the user's folders, so one that would work in the
    notebook's folder gets a copy of it. A folder beyond the profile's upload limits cannot be
    copied: then the input files must do ("none"), and a run that only collects works in place.
    """
    if profile.workspace != "folder" or not (inputs or collect):
        return profile.workspace_source
    if all(_can_be_copied(folder, profile.upload) for folder in folders):
        return "upload"
    return "none" if inputs else "folder"


def _can_be_copied(folder: Path, limits: UploadLimits) -> bool:
    try:
        plan_upload(str(folder), limits)
    except UsageError:
        return False
    return True


def _subscribe(sink: EventSink, listener: Listener) -> None:
    """On the bridge's loop, where events are emitted: none is missed or told twice."""
    for event in tuple(sink.recent):
        listener(event)
    sink.subscribe(listener)


def _session(manager: AsyncKernelManager) -> Any:
    return getattr(manager.provisioner, "session", None)
