"""The steps of a start: a machine from the service, a process in it, its first answer.

The warm path has no pause and no call that could be left out: RunMicrovm, a
token while the machine comes up, the upgrade that the proxy holds until it
runs, the handshake, ``start``, kernel_info.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway import embedded
from gateway.clock import Clock
from gateway.control import LaunchRequest, MachineInfo
from gateway.errors import GuestFault, LaunchFailed, Throttled, TimedOut, UsageError
from gateway.link_codec import LinkKey
from gateway.messages import MalformedMessage, content_of
from gateway.profiles import Profile
from gateway.session.machine import Machine
from gateway.session.record import Record
from gateway.session.smalltalk import MAX_REMEMBERED_BYTES
from gateway.session.traffic import Sink, Traffic
from kernel_guest.shared.errors import PayloadError
from kernel_guest.shared.payload import (
    JournalBounds,
    RunPayload,
    Store,
    Workspace,
    encode_key,
    encode_payload,
)

if TYPE_CHECKING:
    from gateway.link import LinkOwner

__all__ = ["StartRequest", "ask_kernel_info", "obtain_machine", "start_process"]

# A cold kernel of another language; the template's takes 50 ms.
START_TIMEOUT_S = 60.0
KERNEL_INFO_TIMEOUT_S = 60.0
# One gateway process holds a kernel for its life; leases come with the ledger.
EPOCH = 1
RESTART_GRACE_S = 1.0
# A new account launches one machine a second (LM 11).
BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 8.0


class StartRequest(NamedTuple):
    """What a front door says about the kernel process to start."""

    key: bytes
    signature_scheme: str = "hmac-sha256"
    env: Mapping[str, str] = MappingProxyType({})
    extra_arguments: tuple[str, ...] = ()
    cwd: str = ""  # relative to the workspace
    kernel_name: str | None = None  # None: what the profile says
    session: str = ""
    username: str = ""

    def __repr__(self) -> str:
        return f"<StartRequest {self.kernel_name or 'default kernel'}>"


async def obtain_machine(record: Record, key: LinkKey, owner: LinkOwner) -> Machine:
    """RunMicrovm with this session's identity; the machine may still be starting."""
    profile, clock, control = record.profile, record.clock, record.control
    request = _launch_request(profile, _payload(record, key))
    # Only then: imports on two threads at once would delay RunMicrovm by the sum of both.
    await control.prepare()
    loading = record.home.submit(_import_link)
    info = await _run_patiently(record, request)
    await asyncio.wrap_future(loading)
    from gateway.link import Link
    from kernel_guest.shared.link import LinkIdentity

    if info.url is None:
        raise LaunchFailed(info.microvm_id, "the service gave no endpoint")
    identity = LinkIdentity(record.kernel_id, record.generation, EPOCH)
    link = Link(record.home, clock, key, identity, owner, url=info.url)
    return Machine(record.home, control, clock, info, link, record.emit, profile.token_minutes)


def _import_link() -> None:
    """In a process's first start, while the machine comes up: both take about as long."""
    import websockets.asyncio.client  # noqa: F401

    import gateway.link  # noqa: F401


async def _run_patiently(record: Record, request: LaunchRequest) -> MachineInfo:
    """RunMicrovm; throttling beyond the client's own retries is waited out, for a bounded time."""
    clock, profile = record.clock, record.profile
    deadline_s = clock.monotonic_s() + profile.launch_timeout_s
    pause_s = BACKOFF_FIRST_S
    while True:
        try:
            if profile.embedded:
                return await embedded.launch(record.control, request, clock)
            return await record.control.run_microvm(request)
        except Throttled as error:
            wait_s = max(pause_s, error.retry_after_s or 0.0)
            if clock.monotonic_s() + wait_s > deadline_s:
                raise
            record.emit("launch_backoff", reason=error.sentence, duration_ms=round(wait_s * 1000))
            await clock.sleep_s(wait_s)
            pause_s = min(2 * pause_s, BACKOFF_MOST_S)


def _payload(record: Record, key: LinkKey) -> str:
    profile = record.profile
    payload = RunPayload(
        kernel_session=record.kernel_id,
        generation=record.generation,
        epoch=EPOCH,
        public_key=encode_key(key.public_bytes),
        time_s=record.clock.now_s(),
        workspace=_workspace(profile, record.workspace_folder),
        journal=JournalBounds(profile.journal.memory_bytes, profile.journal.disk_bytes),
        store=Store(profile.store_uri, record.kernel_id if profile.store_uri else ""),
    )
    try:
        return encode_payload(payload)
    except PayloadError as error:
        raise UsageError(f"This start cannot be described to a machine: {error}") from error


def _workspace(profile: Profile, folder: str | None) -> Workspace:
    if profile.workspace == "none" or folder is None:
        return Workspace("empty")
    if profile.workspace == "upload":
        return Workspace("upload")
    return Workspace("folder", folder)


def _launch_request(profile: Profile, payload: str) -> LaunchRequest:
    return LaunchRequest(
        image_arn=profile.image_arn or embedded.environment_arn(),
        payload=payload,
        idle=profile.idle,
        maximum_duration_s=profile.maximum_duration_s,
        image_version=profile.image_version,
        execution_role_arn=profile.execution_role_arn,
        ingress_connectors=profile.ingress_connectors,
        egress_connectors=profile.egress_connectors,
    )


async def start_process(
    machine: Machine, op: str, request: StartRequest, kernel_name: str | None
) -> int | None:
    """The ``start`` or ``restart`` call; the process id as the guest has it."""
    args: dict[str, Any] = {
        "kernel_name": kernel_name,
        "key": request.key.decode("utf-8"),
        "signature_scheme": request.signature_scheme,
        "env": dict(request.env),
        "extra_arguments": list(request.extra_arguments),
        "cwd": request.cwd,
        "session": request.session,
        "username": request.username,
    }
    if op == "restart":
        args["grace_s"] = RESTART_GRACE_S
    answer = await machine.link.call(op, args, timeout_s=START_TIMEOUT_S)
    pid = answer.result.get("pid")
    return pid if isinstance(pid, int) else None


async def ask_kernel_info(
    traffic: Traffic, sink: Sink, clock: Clock, kernel_gone: asyncio.Future[None]
) -> dict[str, Any]:
    """Our own kernel_info_request; the content of the reply.

    ``kernel_gone`` fails when the process ends first. Raises KernelGone, TimedOut, GuestFault.
    """
    reply: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()

    def on_reply(parts: tuple[bytes, ...]) -> None:
        if not reply.done():
            reply.set_result(parts)

    traffic.own_request("kernel_info_request", sink, on_reply)
    try:
        await clock.wait_for(_first(reply, kernel_gone), KERNEL_INFO_TIMEOUT_S)
    except TimeoutError as error:
        raise TimedOut("the kernel's first answer", KERNEL_INFO_TIMEOUT_S) from error
    return _kernel_info(reply.result())


async def _first(reply: asyncio.Future[Any], gone: asyncio.Future[None]) -> None:
    await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not reply.done():
        gone.result()


def _kernel_info(parts: tuple[bytes, ...]) -> dict[str, Any]:
    if len(parts[4]) > MAX_REMEMBERED_BYTES:
        raise GuestFault(f"a kernel_info_reply of {len(parts[4])} bytes")
    try:
        content = content_of(parts)
    except MalformedMessage as error:
        raise GuestFault(error.sentence) from error
    if content.get("status", "ok") != "ok":
        raise GuestFault("the kernel answers kernel_info with an error")
    return {**content, "status": "ok"}
