"""The service's side of the keeper: starting it, and asking it for templates."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.local.engines import keeper, process_tree
from gateway.local.engines.environment import scrubbed
from gateway.local.engines.packets import Packet, PacketChannel, make_pair
from gateway.local.interfaces import EngineError

#: Start of an interpreter on a busy machine, with room.
START_WITHIN_S = 20.0
#: After its end-of-file the keeper cleans; see `keeper.CLEAN_WITHIN_S`, twice used there.
END_WITHIN_S = 2 * keeper.CLEAN_WITHIN_S + 5.0
STATE_FILE = "keeper.json"
LOG_FILE = "keeper.log"


class KeeperClient:
    """A running keeper.  Made by `start`; ended by `close`, or by our own death."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: PacketChannel, ready: Packet
    ) -> None:
        self._process = process
        self._channel = channel
        self.pid = process.pid
        self.group = Path(ready["cgroup"]) if ready["cgroup"] else None
        self.reason: str = ready["reason"]

    @classmethod
    async def start(
        cls,
        state_dir: Path,
        *,
        use_cgroup: bool,
        on_exited: Callable[[int, int], None],
        on_lost: Callable[[], None],
    ) -> KeeperClient:
        """Sweep what an earlier keeper left and start a new one.

        `on_exited(pid, wait status)` is called for each child of the keeper that ends,
        `on_lost()` when the keeper itself dies.  Raises EngineError.
        """
        try:
            await asyncio.to_thread(keeper.sweep, state_dir / STATE_FILE)
        except (OSError, process_tree.SurvivorsError) as error:
            raise EngineError(f"an earlier run cannot be cleaned up: {error}") from error
        ours, theirs = make_pair()
        ready: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()

        def notice(packet: Packet) -> None:
            if "exited" in packet:
                on_exited(packet["exited"], packet["status"])
            elif not ready.done():
                ready.set_result(packet)

        def closed() -> None:
            if not ready.done():
                ready.set_exception(EngineError("the keeper ended while it started"))
            else:
                on_lost()

        channel = PacketChannel(ours, on_notice=notice, on_closed=closed)
        with theirs:
            process = await _spawn(state_dir, theirs.fileno(), use_cgroup=use_cgroup)
        try:
            return cls(process, channel, await asyncio.wait_for(ready, START_WITHIN_S))
        except (TimeoutError, EngineError) as error:
            channel.close()
            await process.wait()
            raise EngineError(f"the keeper did not start; see {state_dir / LOG_FILE}") from error

    @property
    def is_alive(self) -> bool:
        return self._channel.is_open

    async def start_template(
        self, argv: Sequence[str], env: dict[str, str], cwd: Path, fds: tuple[int, int]
    ) -> int:
        """Fork a template below the keeper; returns its pid.  Raises EngineError."""
        packet = {"op": "template", "argv": list(argv), "env": env, "cwd": str(cwd)}
        answer = await self._channel.request(packet, fds, within_s=START_WITHIN_S)
        if "pid" not in answer:
            raise EngineError(f"the template cannot be started: {answer['error']}")
        return int(answer["pid"])

    async def note_machine(self, folder: Path, key: process_tree.Key | None) -> None:
        """A machine lives in this folder; let the keeper clean up after it if we die."""
        await self._channel.tell({"op": "machine", "folder": str(folder), "key": key})

    async def note_gone(self, folder: Path) -> None:
        """Nothing of that machine is left."""
        await self._channel.tell({"op": "gone", "folder": str(folder)})

    async def close(self) -> None:
        """Let the keeper clean, and wait until it has.  Raises EngineError."""
        self._channel.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_WITHIN_S)
        except TimeoutError as error:
            self._process.kill()
            raise EngineError("the keeper did not finish cleaning") from error


async def _spawn(
    state_dir: Path, channel_fd: int, *, use_cgroup: bool
) -> asyncio.subprocess.Process:
    name = f"microvm-{os.getuid()}-{secrets.token_hex(4)}"
    options = ["--channel-fd", str(channel_fd), "--state-file", str(state_dir / STATE_FILE)]
    options += ["--name", name] + ([] if use_cgroup else ["--no-cgroup"])
    log_fd = os.open(state_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", keeper.__name__, *options,
            stdin=asyncio.subprocess.DEVNULL, stdout=log_fd, stderr=log_fd,
            pass_fds=(channel_fd,), env=_environment(), start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(log_fd)


def _environment() -> dict[str, str]:
    """Ours, scrubbed, plus the path on which this package was found."""
    environment = scrubbed(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment
