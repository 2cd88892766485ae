"""The kernel session: one kernel, whatever machine carries it.

Every method is a coroutine (or plain call) for the bridge's loop, unless it
says thread-safe. A front door makes one object per kernel id and keeps it for
the kernel's whole life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.clock import Clock
from gateway.control import Control
from gateway.events import EventSink
from gateway.lifecycle import Phase
from gateway.profiles import Profile
from kernel_guest.shared.messages import Channel

OnMessage = Callable[[Channel, tuple[bytes, ...]], None]


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What a front door says about the kernel process to start."""

    key: bytes = field(repr=False)
    signature_scheme: str = "hmac-sha256"
    env: dict[str, str] = field(default_factory=dict, repr=False)
    extra_arguments: tuple[str, ...] = ()
    cwd: str = ""  # relative to the workspace
    kernel_name: str | None = None  # None: what the profile says
    session: str = ""
    username: str = ""


class KernelSession:
    """One kernel's machine, link and requests.

    ``on_message(channel, parts)`` is called on the bridge's loop for every
    message to the client: ``parts`` are signature, header, parent_header,
    metadata, content, buffers…, as on a ZMQ socket after ``<IDS|MSG>``.
    ``on_death(exit_status)`` is called once when the kernel process or its
    machine is gone (not on shutdown_kernel or release).
    """

    def __init__(
        self,
        kernel_id: str,
        profile: Profile,
        control: Control,
        clock: Clock,
        events: EventSink,
        owner: str,
        *,
        workspace_folder: str | None = None,
        on_message: OnMessage | None = None,
        on_death: Callable[[int], None] | None = None,
    ) -> None:
        """Nothing happens yet. ``workspace_folder`` is the client's folder, absolute."""
        raise NotImplementedError

    async def start(self, request: StartRequest) -> dict[str, Any]:
        """Launch a machine (if there is none), start the kernel, wait for its kernel_info.

        Returns the content of the kernel's own kernel_info_reply. Raises from
        the error tree; whatever was launched is then released already.
        """
        raise NotImplementedError

    async def restart_kernel(self, request: StartRequest) -> dict[str, Any]:
        """End the kernel process and start another on the same machine.

        If the machine is gone a new one is launched. Returns as ``start`` does.
        """
        raise NotImplementedError

    def send(self, channel: Channel, parts: Sequence[bytes]) -> None:
        """Client to kernel. Never blocks, never raises for a machine that sleeps or is gone:
        then the request ends with an error reply instead. Raises LinkFull above the bound."""
        raise NotImplementedError

    async def interrupt(self) -> None:
        """Stop what runs now. Does not wake a sleeping machine; does not raise when gone."""
        raise NotImplementedError

    async def signal(self, signum: int) -> None:
        """Deliver a signal to the kernel process. Does not wake; does not raise when gone."""
        raise NotImplementedError

    async def shutdown_kernel(self, now: bool) -> None:
        """End the kernel process; the machine stays. exit_status() is set afterwards."""
        raise NotImplementedError

    async def release(self) -> None:
        """Terminate the machine and wait for the service's word, bounded. Idempotent.

        Safe in atexit. Raises TeardownPending or what the service answered.
        """
        raise NotImplementedError

    async def suspend(self) -> None:
        """Put the machine to sleep now (SuspendMicrovm). The next request wakes it."""
        raise NotImplementedError

    async def put_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a workspace file, in pieces of at most 1 MiB."""
        raise NotImplementedError

    async def get_file(self, path: str, max_bytes: int) -> bytes:
        """Read a workspace file; raises GuestFault beyond ``max_bytes``."""
        raise NotImplementedError

    async def list_files(self, globs: Sequence[str]) -> list[dict[str, Any]]:
        """Workspace files that match: ``{"path", "size", "mode"}``, at most 10 000."""
        raise NotImplementedError

    def exit_status(self) -> int | None:
        """Thread-safe memory read: None while the kernel is (logically) alive."""
        raise NotImplementedError

    @property
    def phase(self) -> Phase:
        """Thread-safe memory read."""
        raise NotImplementedError

    @property
    def reason(self) -> str:
        """Why the session is in this phase, for people; empty in ordinary phases."""
        raise NotImplementedError

    @property
    def kernel_info(self) -> dict[str, Any] | None:
        """Content of the last kernel_info_reply. Thread-safe memory read."""
        raise NotImplementedError

    @property
    def microvm_id(self) -> str | None:
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """Phase, generation, machine, link counters, outstanding requests; for status pages."""
        raise NotImplementedError
