"""One template process per image version, as the engine sees it.

The template (`kernel_guest template`) holds the imports warm and forks machines.
It is a child of the keeper; we hold the other end of its control socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.local.engines.environment import template_environment
from gateway.local.engines.keeper import CONTROL_FD_WORD
from gateway.local.engines.keeper_client import KeeperClient
from gateway.local.engines.packets import Packet, PacketChannel, make_pair
from gateway.local.interfaces import EngineError, ImageBuildError, ImageSpec

#: First import of ipykernel and friends from a cold disk took up to 20 s in CI machines.
READY_WITHIN_S = 90.0
FORK_WITHIN_S = 20.0
LOG_FILE = "template.log"
#: How much of a failed template's log is read for the reason.
LOG_TAIL_BYTES = 8192
#: Modules run from their files, so that tracebacks and debuggers work in them (techniques 7).
FROZEN_OFF = "-Xfrozen_modules=off"

DEFAULT_MODULE = "kernel_guest"


@dataclass(eq=False, slots=True)
class Template:
    """A template that has answered.

    It cannot end before its machines: they die with it.  So a template that is no
    longer wanted is `retired`, and ends when the last of its `machines` has gone.
    """

    image: ImageSpec
    pid: int
    channel: PacketChannel
    machines: int = 0
    retired: bool = False

    @property
    def is_alive(self) -> bool:
        return self.channel.is_open

    async def fork(self, packet: Packet, fds: Sequence[int]) -> int:
        """Fork a machine's init; returns its pid.  Raises EngineError."""
        answer = await self.channel.request(packet, fds, within_s=FORK_WITHIN_S)
        if "pid" not in answer:
            raise EngineError(f"the template refused to fork: {answer.get('error')}")
        return int(answer["pid"])

    def end(self) -> None:
        """End by end-of-file, with everything that it forked.  Idempotent."""
        self.channel.close()


class TemplateShelf:
    """The templates: at most `most` idle ones; who was not used for longest goes first.

    A template that died is started again on its next use.  `on_exited(pid, wait status)`
    is called when a child of a template has ended: an init, or what an init left behind.
    """

    def __init__(self, *, module: str, most: int, on_exited: Callable[[int, int], None]) -> None:
        self._module = module
        self._most = most
        self._on_exited = on_exited
        self._templates: dict[tuple[str, str], Template] = {}
        self._retired: set[Template] = set()
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}

    def has(self, image: ImageSpec) -> bool:
        template = self._templates.get(image.key)
        return template is not None and template.is_alive

    def pids(self) -> set[int]:
        """Of every template that lives."""
        shelved = [*self._templates.values(), *self._retired]
        return {template.pid for template in shelved if template.is_alive}

    async def take(self, image: ImageSpec, keeper: KeeperClient) -> Template:
        """The image's live template, made if there is none.  Raises ImageBuildError.

        Concurrent calls for one image share one template.
        """
        async with self._turns.setdefault(image.key, asyncio.Lock()):
            template = self._templates.pop(image.key, None)
            if template is None or not template.is_alive:
                template = await self._start(image, keeper)
            self._templates[image.key] = template  # at the end: the dict is the order of use
        self._bound()
        return template

    def _bound(self) -> None:
        idle = [key for key, template in self._templates.items() if not template.machines]
        for key in idle[: max(0, len(self._templates) - self._most)]:
            self._templates.pop(key).end()

    def enter(self, template: Template) -> None:
        """Count a machine of this template."""
        template.machines += 1

    def leave(self, template: Template) -> None:
        """A machine of this template has gone."""
        template.machines -= 1
        if template.retired and not template.machines:
            self._retired.discard(template)
            template.end()
        self._bound()

    def drop(self, image: ImageSpec) -> None:
        """Forget the image's template; it ends now or with its last machine."""
        template = self._templates.pop(image.key, None)
        if template is None:
            return
        if template.machines:
            template.retired = True
            self._retired.add(template)
        else:
            template.end()

    def ended(self, pid: int) -> bool:
        """A process has ended; whether it was a template.

        Its control socket may say so too, unless something that it forked still holds it.
        """
        for template in [*self._templates.values(), *self._retired]:
            if template.pid == pid:
                template.end()
                return True
        return False

    def end_all(self) -> None:
        """End every template, with the machines that are left."""
        for template in [*self._templates.values(), *self._retired]:
            template.end()
        self._templates.clear()
        self._retired.clear()

    async def _start(self, image: ImageSpec, keeper: KeeperClient) -> Template:
        python = image.prefix / "bin" / "python"
        if not os.access(python, os.X_OK):
            raise ImageBuildError(f"{image.prefix} is no Python environment: no bin/python there.")
        ours, theirs = make_pair()
        channel = PacketChannel(ours, on_notice=self._notice, on_closed=lambda: None)
        argv = [str(python), FROZEN_OFF, "-m", self._module]
        argv += ["template", "--control-fd", CONTROL_FD_WORD]
        env = template_environment(os.environ, image.prefix, image.environment)
        try:
            with theirs, _fresh_log(image.folder / LOG_FILE) as log_fd:
                fds = (theirs.fileno(), log_fd)
                pid = await keeper.start_template(argv, env, Path("/"), fds)
            await channel.request({"op": "ping"}, within_s=READY_WITHIN_S)
        except EngineError as error:
            channel.close()
            raise ImageBuildError(_reason(image, self._module, error)) from error
        return Template(image, pid, channel)

    def _notice(self, packet: Packet) -> None:
        if "exited" in packet:
            self._on_exited(packet["exited"], packet["status"])


@contextlib.contextmanager
def _fresh_log(path: Path) -> Iterator[int]:
    """A new log per start: an old failure must not be taken for a new one's reason."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _reason(image: ImageSpec, module: str, error: EngineError) -> str:
    """One sentence for the build's stateReason, from the template's last words."""
    lines = _tail(image.folder / LOG_FILE)
    if any(f"No module named {module}" in line for line in lines):
        return (
            f"The environment {image.prefix} cannot carry a kernel: the package {module} is not "
            f"installed there; run {image.prefix}/bin/python -m pip install "
            "microvm-kernel-gateway."
        )
    last = next((line for line in reversed(lines) if line.strip()), str(error))
    return f"The template of {image.prefix} did not start: {last.strip()}"


def _tail(path: Path) -> list[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
