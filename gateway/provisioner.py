"""The entry point ``microvm-provisioner`` of jupyter_client: a kernel in a MicroVM.

Who calls: a ``KernelManager``, in this order (JK 1.2, measured):

    start             pre_launch → launch_kernel → post_launch
    interrupt         send_signal(SIGINT)
    restart(now)      send_signal(SIGINT) → kill(False!) → poll… → wait → cleanup(True) → start
    restart(graceful) send_signal(SIGINT) → shutdown_request → shutdown_requested(True)
                      → poll… → [terminate] → poll… → [kill] → wait → cleanup(True) → start
    shutdown          the same with restart=False → cleanup(False)

Rules that follow from it:

* The ``restart`` flag of ``kill`` and ``terminate`` lies (jupyter_client #1061). They end the
  kernel *process*. The machine is released in ``cleanup(restart=False)`` and nowhere else but at
  interpreter exit, and releasing twice is harmless.
* Methods are called from several loops and threads, some of them stopped or closed between calls
  (JK 1.5). So nothing bound to a loop is kept here: session and door live on the bridge, and every
  method hops over to it. ``poll`` is a memory read, because a console asks 20 times a second.
* ``send_signal`` never raises: an exception there would silently disable restart and autorestart.
* While a launch or restart runs, ``poll`` says alive: a restarter that believes otherwise
  resurrects a kernel that is being stopped.
* A kernelspec names a profile and nothing else (design 6.7); any other member is refused.
* A client that exits without shutting its kernel down (a local kernel would notice and end itself)
  gets its machines released at interpreter exit. A client that is killed cannot do that: then the
  machine's idle policy and maximum duration bound it.

After a fork the child holds copies of its parent's provisioners. They act on nothing there: only
the process that launched a machine may end it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import signal
import weakref
from collections.abc import Coroutine
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import zmq
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Unicode

from gateway import first_calls

first_calls.begin()  # before the imports below, which take as long as its own

# ruff: noqa: E402 -- see the line above
from gateway.bridge import bridge
from gateway.clock import SystemClock
from gateway.config import load_gateway
from gateway.door_sockets import CurveKeys
from gateway.embedded import control_for, prewarm_default, settle_default
from gateway.environment import select_environment
from gateway.errors import GatewayError, UsageError
from gateway.events import EventSink
from gateway.launch_facts import client_folder, curve_keys, is_our_python, user_name
from gateway.lifecycle import Phase
from gateway.messages import Signer
from gateway.profiles import Profile
from gateway.session.runner import KernelSession, StartRequest
from gateway.zmq_door import DoorSettings, ZmqDoor

__all__ = ["MicroVMProvisioner"]

#: What the factory passes. Everything else in a kernelspec's ``config`` would set a trait.
_FACTORY_ARGUMENTS: Final = frozenset({"kernel_id", "kernel_spec", "parent", "profile"})
#: How often ``wait`` looks, and for how long: its callers have seen the exit already.
_WAIT_INTERVAL_S: Final = 0.05
_WAIT_LIMIT_S: Final = 10.0
#: A request to a parked machine first mints a token, wakes it and reconnects (LM 12: about 1 s,
#: and seconds for a large memory image).
_WAKE_ALLOWANCE_S: Final = 10.0
#: After the first launch of a process, until its own service client is made: see _settle_soon.
SETTLE_AFTER_S: Final = 1.0
#: At interpreter exit: how long all machines together may take to be released.
_EXIT_LIMIT_S: Final = 20.0


class _Stage(Enum):
    """What the kernel manager should believe about the process."""

    NONE = auto()
    STARTING = auto()
    RUNNING = auto()


class MicroVMProvisioner(KernelProvisionerBase):
    """One kernel id's kernel: a session with a machine, behind five local sockets.

    ``session`` is the kernel session of the last launch, for callers that move files or want the
    machine's facts; ``None`` before the first launch.
    """

    profile = Unicode(
        "",
        config=True,
        help="The profile (jupyter_microvm_config.py) to start the kernel with; "
        "the default profile when empty.",
    )

    def __init__(self, **kwargs: Any) -> None:
        _refuse_other_settings(kwargs)
        super().__init__(**kwargs)
        self.session: KernelSession | None = None
        self._held: KernelSession | None = None
        # Also those that overlapping restarts and shutdowns pushed aside: none may be forgotten.
        self._unreleased: set[KernelSession] = set()
        self._door: ZmqDoor | None = None
        self._stage = _Stage.NONE
        self._last_exit = 0
        self._chosen: Profile | None = None
        self._folder = ""
        self._extra_arguments: tuple[str, ...] = ()
        self._curve: CurveKeys | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<MicroVMProvisioner {self.kernel_id} {self._stage.name.lower()} {self._door!r}>"

    # -- what the manager reads ---------------------------------------------------

    @property
    def has_process(self) -> bool:
        """True from the moment a kernel may exist until ``wait`` or ``cleanup`` finished it."""
        return self._stage is not _Stage.NONE

    async def poll(self) -> int | None:
        """``None`` while alive or in transition, else the exit status. A memory read."""
        return self._exit_status()

    def _exit_status(self) -> int | None:
        if self._stage is _Stage.NONE:
            return self._last_exit
        if self._stage is _Stage.STARTING or self.session is None:
            return None
        return self.session.exit_status()

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Longer when the polite request has to wake or reach the machine first."""
        awake = self.session is None or self.session.phase is Phase.READY
        return recommended if awake else recommended + _WAKE_ALLOWANCE_S

    def resolve_path(self, path: str) -> str | None:
        """A path as the kernel sees it, when kernel and client share the folder; else ``None``."""
        if self._chosen is None or self._chosen.workspace != "folder":
            return None
        full = Path(self._folder, Path(path).expanduser()).resolve()
        return full.as_posix() if full.exists() else None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """JSON-ready facts, for applications that keep records of their kernels."""
        info: dict[str, Any] = await super().get_provisioner_info()
        info["connection_info"] = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in self.connection_info.items()
        }
        microvm_id = self.session.microvm_id if self.session else None
        return info | {"profile": self.profile, "microvm_id": microvm_id}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """The inverse, as far as names go: a kernel lives as long as its client process."""
        await super().load_provisioner_info(provisioner_info)
        key = self.connection_info.get("key", b"")
        # The declared type is str; managers hand out and compare bytes (JK 1.3).
        self.connection_info["key"] = key.encode() if isinstance(key, str) else key  # type: ignore
        self.profile = provisioner_info.get("profile", self.profile)

    # -- start and restart --------------------------------------------------------

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Bind the sockets (first launch) and choose the environment. Starts nothing.

        Returns the arguments for ``launch_kernel``. Raises ``GatewayError`` (profile, ports), and
        ``RuntimeError`` as jupyter_client's own provisioner does for encryption and interfaces.
        """
        manager = self._manager()
        self._chosen = self._choose_profile()
        prewarm_default(self._chosen)
        self._curve = curve_keys(manager, kwargs.pop("transport_encryption", None))
        self._extra_arguments = tuple(kwargs.pop("extra_arguments", ()))
        command = manager.format_kernel_cmd(extra_arguments=list(self._extra_arguments))
        session_name = kwargs.get("env", {}).get("JPY_SESSION_NAME", "")
        kwargs = await super().pre_launch(cmd=command, **kwargs)
        await self._ready_door(manager, session_name)
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel (or restart it in its machine); returns when it answers kernel_info.

        Returns the complete connection dictionary. Raises ``GatewayError`` with one sentence; what
        was launched is released then.
        """
        first = self._held is None
        self._stage = _Stage.STARTING
        try:
            await self._launch(kwargs)
        except BaseException:
            self._stage = _Stage.NONE
            if first:
                self._abandon()
            raise
        self._stage = _Stage.RUNNING
        self._say_started(first)
        return self.connection_info

    async def _launch(self, kwargs: dict[str, Any]) -> None:
        self._folder = client_folder(kwargs.get("cwd"))
        request = self._start_request(kwargs["env"])
        if self._held is not None:
            await bridge().run(self._held.restart_kernel(request))
            return
        self.session = self._held = await bridge().run(self._make_session())
        self._unreleased.add(self._held)
        _holders.add(self)
        await bridge().run(self._held.start(request))
        if first_calls.pending():
            await bridge().run(_settle_soon(self._chosen))

    async def _make_session(self) -> KernelSession:
        """On the bridge: a session whose messages go to the door, and the other way."""
        assert self._door is not None
        assert self._chosen is not None
        session = KernelSession(
            self.kernel_id,
            self._chosen,
            control_for(self._chosen),
            SystemClock(),
            EventSink(),
            user_name(),
            workspace_folder=self._folder if self._chosen.workspace != "none" else None,
            on_message=self._door.deliver,
        )
        self._door.attach(session)
        return session

    def _start_request(self, env: dict[str, str]) -> StartRequest:
        manager = self._manager()
        return StartRequest(
            key=manager.session.key,
            signature_scheme=manager.session.signature_scheme,
            env=env,
            extra_arguments=self._extra_arguments,
            kernel_name=self._kernel_name(manager),
            session=manager.session.session,
            username=manager.session.username,
        )

    def _kernel_name(self, manager: Any) -> str | None:
        """The kernelspec inside the machine; ``None`` is what the profile says.

        Another one only for a kernelspec that does not name us: it came here because we are the
        default provisioner. A machine that shares our files gets its folder, any other its name.
        """
        spec = self.kernel_spec
        if "kernel_provisioner" in spec.metadata or is_our_python(spec.argv):
            return None
        assert self._chosen is not None
        shared = self._chosen.workspace == "folder" and os.path.isdir(spec.resource_dir)
        return os.path.abspath(spec.resource_dir) if shared else str(manager.kernel_name)

    def _choose_profile(self) -> Profile:
        settings = load_gateway(self.config, self.log)
        return settings.profile(self.profile or None, user_name())

    def _manager(self) -> Any:
        if self.parent is None:
            raise UsageError("The MicroVM provisioner works under a KernelManager only.")
        return self.parent

    def _finalize_env(self, env: dict[str, str]) -> None:
        """Reduce the client's environment to the allow-list, in place."""
        super()._finalize_env(env)
        own = {name: env[name] for name in self.kernel_spec.env if name in env}
        allowed = self._chosen.environment if self._chosen else ()
        chosen = select_environment(env, own, allowed)
        env.clear()
        env.update(chosen)

    def _say_started(self, first: bool) -> None:
        assert self.session is not None
        assert self._chosen is not None
        self.log.info(
            "Kernel %s %s in machine %s (profile %s, workspace %s of %s)",
            self.kernel_id,
            "started" if first else "restarted",
            self.session.microvm_id,
            self._chosen.name,
            self._chosen.workspace,
            self._folder,
        )

    # -- the door -----------------------------------------------------------------

    async def _ready_door(self, manager: Any, session_name: str) -> None:
        """Sockets, and the manager's knowledge of them: whoever sees a process sees its ports."""
        signer = Signer(manager.session.key, manager.session.signature_scheme)
        if self._door is None:
            self._door = await bridge().run(self._open_door(manager, signer))
        else:
            await bridge().run(self._renew_door(self._door, signer))
        self.connection_info = self._connection_info(manager, self._door)
        for name, port in self._door.ports.items():
            setattr(manager, name, port)
        manager.write_connection_file(jupyter_session=session_name)

    async def _open_door(self, manager: Any, signer: Signer) -> ZmqDoor:
        """Bind where the manager says; ports that it remembers from us may be taken meanwhile."""
        wanted = tuple(manager.ports)
        remembered = tuple(self.connection_info.get(name, -1) for name in _PORT_NAMES) == wanted
        attempts = [wanted, (0,) * len(_PORT_NAMES)] if remembered else [wanted]
        for ports in attempts:
            door = ZmqDoor(
                self._door_settings(manager, signer, ports),
                SystemClock(),
                self.log,
                alive=lambda: self._exit_status() is None,
            )
            try:
                await door.open()
                return door
            except zmq.ZMQError as error:
                problem = error
        raise UsageError(
            f"Cannot listen on {manager.ip} ports {wanted}: {problem.strerror}."
        ) from problem

    def _door_settings(self, manager: Any, signer: Signer, ports: tuple[int, ...]) -> DoorSettings:
        by_name = dict(zip(_PORT_NAMES, ports, strict=True))
        return DoorSettings(
            signer=signer,
            transport=manager.transport,
            place=manager.ip,
            ports=by_name,
            curve=self._curve,
        )

    async def _renew_door(self, door: ZmqDoor, signer: Signer) -> None:
        door.use_signer(signer)
        door.rebind()

    def _connection_info(self, manager: Any, door: ZmqDoor) -> KernelConnectionInfo:
        info: dict[str, Any] = {
            "transport": manager.transport,
            "ip": manager.ip,
            "key": manager.session.key,
            "signature_scheme": manager.session.signature_scheme,
            **door.ports,
        }
        if self._curve is not None:
            info["curve_publickey"] = self._curve.public.decode()
            info["curve_secretkey"] = self._curve.secret.decode()
        return info  # type: ignore[return-value]

    # -- signals and ends ---------------------------------------------------------

    async def send_signal(self, signum: int) -> None:
        """Deliver a signal to the kernel process. Never raises, whatever is gone."""
        session = self._active()
        if session is None or signum == 0:
            return
        if signum == signal.SIGINT:
            await self._quietly("interrupt", session.interrupt())
        elif signum == signal.SIGKILL:
            await self.kill()
        else:
            await self._quietly(f"signal {signum}", session.signal(signum))

    async def kill(self, restart: bool = False) -> None:
        """End the kernel process at once. The machine stays."""
        session = self._active()
        if session is not None:
            await self._quietly("kill", session.shutdown_kernel(now=True))

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel process hard to end (SIGTERM). The machine stays."""
        await self.send_signal(signal.SIGTERM)

    async def wait(self) -> int | None:
        """Wait until the process is seen gone, bounded; then there is no process any more."""
        deadline_s = SystemClock().monotonic_s() + _WAIT_LIMIT_S
        # Not an event: the caller's loop may be another one at each call.
        while self._exit_status() is None and SystemClock().monotonic_s() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_WAIT_INTERVAL_S)
        self._end_process()
        return self._last_exit

    async def cleanup(self, restart: bool = False) -> None:
        """Without ``restart``: terminate the machine and close the sockets. Idempotent.

        A termination that the service did not confirm is logged, kept, and tried again by the next
        ``cleanup`` and at interpreter exit.
        """
        if restart or self._foreign():
            return
        self._end_process()
        for session in tuple(self._unreleased):
            await self._release(session)
        if self._door is not None:
            door, self._door = self._door, None
            await bridge().run(door.close())

    async def _release(self, session: KernelSession) -> None:
        try:
            await bridge().run(session.release())
        except GatewayError as error:
            self.log.error("Kernel %s: %s", self.kernel_id, error.sentence)
            return
        self.log.info("Kernel %s: machine %s released", self.kernel_id, session.microvm_id)
        self._forget(session)

    def _forget(self, session: KernelSession) -> None:
        """Its machine is gone, confirmed."""
        self._unreleased.discard(session)
        if self._held is session:
            self._held = None
        if not self._unreleased:
            _holders.discard(self)

    def _end_process(self) -> None:
        if self._stage is not _Stage.NONE and self._stage is not _Stage.STARTING:
            status = self._exit_status()
            self._last_exit = status if status is not None else 0
            self._stage = _Stage.NONE

    def _abandon(self) -> None:
        """A first launch failed or was cancelled: nobody knows its sockets."""
        session, self._held = self._held, None
        door, self._door = self._door, None
        bridge().post(_spawn_abandonment, self, session, door)

    def _active(self) -> KernelSession | None:
        """The session, unless there is no process or it belongs to another process."""
        return None if self._foreign() or not self.has_process else self.session

    def _foreign(self) -> bool:
        return self._pid != os.getpid()

    async def _quietly(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        """Do it, and only log what goes wrong: see ``send_signal`` in the module's header."""
        try:
            await bridge().run(work)
        except Exception as error:
            self.log.warning("Kernel %s: %s failed: %s", self.kernel_id, what, error)


#: The order of jupyter_client.connect.port_names, which ``KernelManager.ports`` follows.
_PORT_NAMES: Final = ("shell_port", "stdin_port", "iopub_port", "hb_port", "control_port")


async def _settle_soon(profile: Profile | None) -> None:
    """Not at once: the first cell would share the interpreter's lock with a burst of imports."""
    if profile is not None:
        job = functools.partial(settle_default, profile)
        asyncio.get_running_loop().call_later(SETTLE_AFTER_S, bridge().submit, job)


def _refuse_other_settings(arguments: dict[str, Any]) -> None:
    """Raises ``UsageError`` for what a kernelspec must not set: roles, images, traits, anything."""
    others = sorted(set(arguments) - _FACTORY_ARGUMENTS)
    if others:
        spec = getattr(arguments.get("kernel_spec"), "display_name", "") or "the kernelspec"
        raise UsageError(
            f"{spec!r} sets {', '.join(others)} for {MicroVMProvisioner.__name__}; only 'profile' "
            "may be set there, the rest belongs in jupyter_microvm_config.py."
        )


# -- machines whose provisioner went away without a word ---------------------------

_holders: weakref.WeakSet[MicroVMProvisioner] = weakref.WeakSet()


def _spawn_abandonment(
    owner: MicroVMProvisioner, session: KernelSession | None, door: ZmqDoor | None
) -> None:
    """On the bridge: end what a failed launch left."""
    bridge().spawn(_give_up(owner, session, door), "abandon a launch")


async def _give_up(
    owner: MicroVMProvisioner, session: KernelSession | None, door: ZmqDoor | None
) -> None:
    if door is not None:
        await door.close()
    if session is not None:
        await owner._release(session)


@atexit.register
def _release_all() -> None:
    """Interpreter exit: release what nobody released. The bridge's threads still run here."""
    sessions = [session for p in _holders if not p._foreign() for session in p._unreleased]
    if sessions:
        with contextlib.suppress(TimeoutError):
            bridge().call(_release_sessions, sessions)


async def _release_sessions(sessions: list[KernelSession]) -> None:
    async with asyncio.timeout(_EXIT_LIMIT_S):
        await asyncio.gather(*(_end_politely(session) for session in sessions))


async def _end_politely(session: KernelSession) -> None:
    """Let the kernel's own exit handlers run, as they do when a local kernel's parent ends."""
    with contextlib.suppress(GatewayError):
        await session.shutdown_kernel(now=False)
    with contextlib.suppress(GatewayError):
        await session.release()
