"""What the parts of the local service know of each other.

```
api/ ──▶ machines.py ──▶ Engine ──▶ RunningMachine
                 │  ▲                    │ open_port
                 ▼  │ ProxiedMachine     ▼
               Proxy ───────────────▶ guest sockets
```

`gateway/local/machines.py` owns the life of a machine and is the only caller
of `Engine`.  It starts one `Proxy` per machine and hands it a
`ProxiedMachine`, the narrow view of itself that the data plane may use.
Everything here lives on one asyncio loop; nothing is thread-safe.

Where the implementations live and how `service.py` makes them:

- `gateway.local.engines.process.ProcessEngine(state_dir: Path)`, an `Engine`
- `gateway.local.proxy.MachineProxy(machine, limits, clock, faults)`, a `Proxy`
- `gateway.local.faults.FaultBoard(clock)`, asked by all of them whether a fault strikes
- `gateway.local.hooks.call_hook(...)`, the HTTP client for lifecycle hooks that
  machines.py (run, suspend, resume, terminate) and an engine's `prepare_image`
  (ready, validate) share
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

AGENT_PORT = 8080
"""Port of the guest's data-plane server; the proxy's default port (LM 4.1)."""

HOOK_PORT = 9000
"""Port of the guest's hook server by convention (LM 7.1)."""


class ImageBuildError(Exception):
    """An image could not be made ready; `reason` becomes the build's stateReason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EngineError(Exception):
    """The engine could not do what was asked with a machine; a sentence says why."""


class NotAdmittedError(Exception):
    """The machine cannot serve this request: the proxy answers 502, empty body."""


class TokenVerdict(enum.Enum):
    """Why a token was refused; status and body as LM 4.3 has them recorded."""

    MISSING = (403, b"Request missing authentication")
    FAILED = (403, b"Token authentication failed")
    PORT_DENIED = (403, b"Access to port denied")
    SHELL_ONLY = (502, b"")

    @property
    def status(self) -> int:
        return self.value[0]

    @property
    def body(self) -> bytes:
        return self.value[1]


class TokenRefusedError(Exception):
    """A data-plane token was not accepted; `verdict` says what to answer."""

    def __init__(self, verdict: TokenVerdict) -> None:
        super().__init__(verdict.name)
        self.verdict = verdict


class TokenGrant(Protocol):
    """What a verified token permits."""

    def allows(self, port: int) -> bool:
        """Whether the token's allowedPorts hold `port`."""
        ...


@dataclass(frozen=True, slots=True)
class HookSettings:
    """The lifecycle hooks of an image (LM 7.1): a time limit in seconds, or None if disabled."""

    port: int = HOOK_PORT
    ready_s: float | None = None
    validate_s: float | None = None
    run_s: float | None = None
    resume_s: float | None = None
    suspend_s: float | None = None
    terminate_s: float | None = None


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """One version of an image, as an engine needs it.

    `prefix` is a Python environment (a folder with `bin/python`) with the guest
    installed.  `folder` belongs to this version: an engine may keep its template's
    log there; it exists when an engine is called.
    """

    image_arn: str
    version: str
    prefix: Path
    folder: Path
    memory_mib: int = 2048
    hooks: HookSettings = field(default_factory=HookSettings)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the template: image ARN and version."""
        return (self.image_arn, self.version)


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine to be started.

    `folder` does not exist yet and its path is short (less than 50 bytes, because
    unix socket paths below it are limited); the engine makes it 0700 and removes
    it in `kill`.  `log_path` (made 0600 by the engine) outlives the machine.
    """

    microvm_id: str
    image: ImageSpec
    folder: Path
    log_path: Path


class RunningMachine(Protocol):
    """A started machine, made by `Engine.start`."""

    @property
    def microvm_id(self) -> str: ...

    @property
    def pid(self) -> int:
        """Process id of the machine's init."""
        ...

    @property
    def folder(self) -> Path: ...

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a port inside the machine.

        8080 and 9000 reach the guest's own listeners, every other port
        127.0.0.1:<port>.  Raises OSError when nothing listens there.
        """
        ...


class Engine(Protocol):
    """How machines run.  Called by machines.py and images/ only."""

    on_exit: Callable[[str, int], None]
    """Set by the owner: called with (microvm_id, wait status) when a machine's init
    ends by itself, never for a `kill`."""

    def has_template(self, image: ImageSpec) -> bool:
        """Whether `start` can be called for this image now."""
        ...

    async def prepare_image(self, image: ImageSpec, *, call_hooks: bool = True) -> None:
        """Make the image's template.

        With `call_hooks` (an image build) the enabled ready and validate hooks are
        called within their time limits; without (the service was restarted, the
        image was built before) only the template is started.  Concurrent calls for
        one image share one template.  Raises ImageBuildError.
        """
        ...

    async def release_image(self, image: ImageSpec) -> None:
        """End the image's template, if there is one; running machines stay."""
        ...

    async def start(self, machine: MachineSpec) -> RunningMachine:
        """Start a machine from its image's template; listeners exist when it returns.

        Raises EngineError; then nothing of the machine is left.
        """
        ...

    async def freeze(self, machine: RunningMachine) -> None:
        """Stop every process of the machine from running.  Raises EngineError."""
        ...

    async def thaw(self, machine: RunningMachine) -> None:
        """Let a frozen machine run again.  Raises EngineError."""
        ...

    async def kill(self, machine: RunningMachine) -> None:
        """End the machine, frozen or not: no process, socket or folder is left when
        this returns.  Idempotent.  Raises EngineError when something survives."""
        ...

    async def close(self) -> None:
        """Kill every machine and end every template."""
        ...


class PendingPolicy(enum.Enum):
    """What a request meets while its machine is PENDING (LM 4.3: 502 or refused)."""

    HOLD = "hold"
    REFUSE = "502"


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """The data plane's limits for one machine (LM 4.4); None switches a limit off."""

    max_connections: int | None = None
    requests_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    quiet_socket_s: float | None = 60.0


class ProxiedMachine(Protocol):
    """What a proxy may know and ask of its machine.

    Order of checks for a request: `read_token` (403 by verdict), port header or
    subprotocol (400), `grant.allows` (403), caps (429), `note_inbound`, `admit`
    (held, or 502), `open_port` of what `admit` returned (502 on OSError).
    """

    @property
    def microvm_id(self) -> str: ...

    def read_token(self, token: str | None) -> TokenGrant:
        """Verify a token for this machine, now.  Raises TokenRefusedError."""
        ...

    def note_inbound(self, size_bytes: int) -> None:
        """Bytes came from a client: resets the idle timer.

        Called for each accepted request (head included) and for each chunk spliced
        towards the guest.
        """
        ...

    async def admit(self) -> RunningMachine:
        """Wait until the machine can serve.

        While PENDING: held or refused by `PendingPolicy`.  While SUSPENDED: resumes
        the machine if its policy says autoResumeEnabled and waits for the resume
        hook.  Raises NotAdmittedError in every other state.
        """
        ...


class Proxy(Protocol):
    """The data plane of one machine: one listener on 127.0.0.1."""

    async def start(self, port: int = 0) -> int:
        """Listen; returns the port.  Raises OSError."""
        ...

    def cut_connections(self) -> None:
        """Abort every open connection that has been spliced to the guest.

        Called when the machine is about to be frozen or has ended; requests that
        wait in `admit` are not touched.
        """
        ...

    async def close(self) -> None:
        """Stop listening and abort every connection; idempotent."""
        ...


class FaultPoint(enum.Enum):
    """Where machines.py and api/ ask whether a fault was ordered."""

    RUN_HOOK = "run-hook"
    RESUME_HOOK = "resume-hook"
    SUSPEND_HOOK = "suspend-hook"
    API_THROTTLED = "api-429"
    API_QUOTA = "api-402"
    API_CAPACITY = "api-capacity"
    API_HTML_502 = "api-html-502"
    CREDENTIALS_EXPIRED = "credentials-expired"
