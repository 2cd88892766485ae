"""The process engine: a machine is a forked process with its descendants.

Works anywhere, isolates nothing.  One template per image version is a warm
interpreter; `start` makes the machine's private folder, binds its two unix
listeners and has the template fork the machine's init, which takes over the
listeners.  Freezing and killing are `confinement.py`, surviving our own death is
`keeper.py`.

Order in `start`: the keeper learns of the folder first, so that a service killed
at any later point leaves nothing; the listeners exist before the fork, so that a
client may connect as soon as `start` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gateway.local.engines import process_tree
from gateway.local.engines.confinement import (
    Capabilities,
    Captive,
    CgroupConfinement,
    Confinement,
    Household,
    TreeConfinement,
)
from gateway.local.engines.folders import make_private, remove_tree
from gateway.local.engines.keeper_client import KeeperClient
from gateway.local.engines.packets import Packet
from gateway.local.engines.process_tree import SurvivorsError
from gateway.local.engines.templates import DEFAULT_MODULE, Template, TemplateShelf
from gateway.local.engines.trial import try_out
from gateway.local.interfaces import (
    AGENT_PORT,
    HOOK_PORT,
    EngineError,
    ImageBuildError,
    ImageSpec,
    MachineSpec,
    RunningMachine,
)

log = logging.getLogger(__name__)

#: A template costs about 50 MB resident (techniques, memory): bound how many stay warm.
MAX_TEMPLATES = 4
#: The proxy may open a burst of connections before the guest accepts the first.
BACKLOG = 1024
#: sun_path is 108 bytes on Linux and 104 on macOS, the final zero included.
SOCKET_PATH_BYTES = 100
AGENT_SOCKET = "agent.sock"
HOOK_SOCKET = "hook.sock"
#: Exits of unknown processes that are remembered; more never arrive between fork and entry.
EARLY_EXITS_KEPT = 64


def _no_owner(microvm_id: str, status: int) -> None:
    """Until machines.py sets `on_exit`."""


@dataclass(eq=False, slots=True)
class ProcessMachine:
    """A started machine: `RunningMachine` for its callers, the rest for the engine.

    It keeps the confinement that it was started in: after the death of a keeper a new
    machine may have another one.
    """

    microvm_id: str
    folder: Path
    captive: Captive
    confinement: Confinement = field(repr=False)
    template: Template | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        return self.captive.pid

    async def open_port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `RunningMachine.open_port`."""
        name = {AGENT_PORT: AGENT_SOCKET, HOOK_PORT: HOOK_SOCKET}.get(port)
        if name is None:
            return await asyncio.open_connection("127.0.0.1", port)
        return await asyncio.open_unix_connection(str(self.folder / name))


class ProcessEngine:
    """See `Engine`.  `state_dir` holds the keeper's log and state file.

    `use_cgroup=False` forces the process-tree way; `template_module` is for tests.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        use_cgroup: bool = True,
        max_templates: int = MAX_TEMPLATES,
        template_module: str = DEFAULT_MODULE,
    ) -> None:
        self.on_exit: Callable[[str, int], None] = _no_owner
        self._state_dir = state_dir
        self._use_cgroup = use_cgroup
        self._shelf = TemplateShelf(
            module=template_module, most=max_templates, on_exited=self._exited
        )
        self._keeper_turn = asyncio.Lock()
        self._fork_turn = asyncio.Lock()
        self._keeper: KeeperClient | None = None
        self._lost_keepers: list[KeeperClient] = []
        self._machines: dict[int, ProcessMachine] = {}
        self._early_exits: dict[int, int] = {}

    def __repr__(self) -> str:
        keeper = self._keeper.pid if self._keeper else None
        return f"<ProcessEngine keeper={keeper} machines={len(self._machines)}>"

    async def capabilities(self) -> Capabilities:
        """How machines are held here.  Starts the keeper.  Raises EngineError."""
        return self._confine(await self._live_keeper()).capabilities

    # -- the keeper --------------------------------------------------------------

    async def _live_keeper(self) -> KeeperClient:
        """The keeper, started at the first use and again after it died."""
        async with self._keeper_turn:
            if self._keeper is None:
                await self._see_lost_keepers_out()
                self._keeper = await KeeperClient.start(
                    self._state_dir,
                    use_cgroup=self._use_cgroup,
                    on_exited=self._exited,
                    on_lost=self._keeper_lost,
                )
            return self._keeper

    def _confine(self, keeper: KeeperClient) -> Confinement:
        if keeper.group is not None:
            return CgroupConfinement(keeper.group)
        return TreeConfinement(
            Household(
                keeper_pid=keeper.pid,
                parents=lambda: self._shelf.pids() | {keeper.pid},
                inits=lambda: self._machines,
                turn=self._fork_turn,
            )
        )

    def _keeper_lost(self) -> None:
        """Somebody killed the keeper: nothing that it held can be trusted to be cleaned."""
        if self._keeper is not None:
            self._lost_keepers.append(self._keeper)
            self._keeper = None
        self._shelf.end_all()
        for machine in list(self._machines.values()):
            self._exited(machine.pid, signal.SIGKILL)

    async def _see_lost_keepers_out(self) -> None:
        """A keeper that was asked to end (SIGTERM) may still be cleaning."""
        while self._lost_keepers:
            await self._lost_keepers.pop().close()

    def _exited(self, pid: int, status: int) -> None:
        """A child of the keeper or of a template has ended."""
        machine = self._machines.pop(pid, None)
        if machine is not None:
            self.on_exit(machine.microvm_id, status)
        elif not self._shelf.ended(pid):
            self._note_early(pid, status)

    def _note_early(self, pid: int, status: int) -> None:
        """An init may end before `start` has entered it; its orphans come by here too."""
        self._early_exits[pid] = status
        while len(self._early_exits) > EARLY_EXITS_KEPT:
            del self._early_exits[next(iter(self._early_exits))]

    # -- images --------------------------------------------------------------------

    def has_template(self, image: ImageSpec) -> bool:
        return self._shelf.has(image)

    async def prepare_image(self, image: ImageSpec, *, call_hooks: bool = True) -> None:
        await self._template(image)
        if call_hooks:
            await try_out(self, image)

    async def release_image(self, image: ImageSpec) -> None:
        self._shelf.drop(image)

    async def _template(self, image: ImageSpec) -> Template:
        try:
            keeper = await self._live_keeper()
        except EngineError as error:
            raise ImageBuildError(str(error)) from error
        return await self._shelf.take(image, keeper)

    # -- machines ------------------------------------------------------------------

    async def start(self, machine: MachineSpec) -> RunningMachine:
        _check_folder(machine.folder)
        try:
            template = await self._template(machine.image)
        except ImageBuildError as error:
            raise EngineError(error.reason) from error
        keeper = await self._live_keeper()
        running = ProcessMachine(
            machine.microvm_id, machine.folder, Captive(), self._confine(keeper)
        )
        running.template = template
        self._shelf.enter(template)
        try:
            await keeper.note_machine(machine.folder, None)
            async with self._fork_turn:
                await self._fork(machine, template, running)
            await keeper.note_machine(machine.folder, running.captive.key)
        except (OSError, EngineError) as error:
            await self.kill(running)
            raise EngineError(f"a machine cannot be started: {error}") from error
        return running

    async def _fork(
        self, machine: MachineSpec, template: Template, running: ProcessMachine
    ) -> None:
        make_private(machine.folder)
        captive = running.captive
        captive.group = running.confinement.group_for(machine.folder.name)
        with contextlib.ExitStack() as stack:
            fds = [
                stack.enter_context(_listener(machine.folder / AGENT_SOCKET)),
                stack.enter_context(_listener(machine.folder / HOOK_SOCKET)),
                stack.enter_context(_append_only(machine.log_path)),
            ]
            pid = await template.fork(_fork_packet(machine, captive.group), fds)
        process = process_tree.read_process(pid)
        captive.pid, captive.key = pid, process.key if process else None
        self._machines[pid] = running
        self._check_early_exit(machine, captive)

    def _check_early_exit(self, machine: MachineSpec, captive: Captive) -> None:
        """The notice of its exit may have come before the machine was entered."""
        status = self._early_exits.pop(captive.pid, None)
        if status is not None and not (captive.key and process_tree.still_there([captive.key])):
            raise EngineError(f"its init ended with wait status {status}; see {machine.log_path}")

    async def freeze(self, machine: RunningMachine) -> None:
        assert isinstance(machine, ProcessMachine)
        await self._hold("frozen", machine, machine.confinement.freeze)

    async def thaw(self, machine: RunningMachine) -> None:
        assert isinstance(machine, ProcessMachine)
        await self._hold("thawed", machine, machine.confinement.thaw)

    async def kill(self, machine: RunningMachine) -> None:
        assert isinstance(machine, ProcessMachine)
        self._machines.pop(machine.pid, None)
        await self._hold("ended", machine, machine.confinement.kill)
        if machine.template is not None:
            self._shelf.leave(machine.template)
            machine.template = None
        await self._remove(machine.folder)

    async def _hold(
        self,
        what: str,
        machine: ProcessMachine,
        action: Callable[[Captive], Awaitable[None]],
    ) -> None:
        try:
            await action(machine.captive)
        except (SurvivorsError, OSError) as error:
            raise EngineError(f"machine {machine.microvm_id} was not {what}: {error}") from error

    async def _remove(self, folder: Path) -> None:
        """Remove a machine's folder; off the loop, because a workspace may be large."""
        try:
            await asyncio.to_thread(remove_tree, folder)
        except OSError as error:
            raise EngineError(f"the folder {folder} cannot be removed: {error}") from error
        if self._keeper is not None:
            # A keeper that has just gone will clean nothing; there is nothing left to clean.
            with contextlib.suppress(EngineError):
                await self._keeper.note_gone(folder)

    async def close(self) -> None:
        """Kill every machine, end every template and the keeper.  Idempotent.

        A machine that withstands its kill is left to the keeper, which tries once more.
        Raises EngineError when that fails too.
        """
        for machine in list(self._machines.values()):
            try:
                await self.kill(machine)
            except EngineError as error:
                log.warning("%s", error)
        self._shelf.end_all()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()
        await self._see_lost_keepers_out()


def _check_folder(folder: Path) -> None:
    """Raises EngineError.  A folder that exists is somebody else's, not to be removed by us."""
    if os.path.lexists(folder):
        raise EngineError(f"the machine folder {folder} exists already")
    longest = os.fsencode(folder / AGENT_SOCKET)
    if len(longest) > SOCKET_PATH_BYTES:
        raise EngineError(f"the machine folder {folder} is too long for a unix socket")


def _fork_packet(machine: MachineSpec, group: Path | None) -> Packet:
    """The template's order; the three descriptors travel beside it in this order."""
    return {
        "op": "machine",
        "microvm_id": machine.microvm_id,
        "folder": str(machine.folder),
        "agent_fd": 0,
        "hook_fd": 1,
        "log_fd": 2,
        "cgroup": str(group) if group else None,
        "env": {
            "KERNEL_GUEST_ALLOW_FOLDER": "1",
            "KERNEL_GUEST_FOLDER": str(machine.folder),
        },
    }


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[int]:
    """A listening unix socket, only for this user; closed here once the init has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        yield listener.fileno()


@contextlib.contextmanager
def _append_only(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
