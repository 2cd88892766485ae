"""A kernel session on a real local service, as tests drive it.

``local_service`` runs one service for the whole test run; each test gets kernels
of its own, and nothing is left of them. Everything of a session happens on the
bridge's loop, so a test is a plain function with an inner coroutine:

    def test_it(local_service):
        async def steps(kit):
            async with kit.kernel() as kernel:
                assert (await kernel.execute("1 + 1")).value == "2"
        local_service.run(steps)
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gateway.bridge import bridge
from gateway.clock import Clock, SystemClock
from gateway.control import Control
from gateway.embedded import access_of
from gateway.events import Event, EventSink
from gateway.local import client
from gateway.messages import Composer, Signer, content_of, header_of, parent_of
from gateway.profiles import IdlePolicy, Profile
from gateway.session.runner import KernelSession, StartRequest
from kernel_guest.shared.messages import Channel

T = TypeVar("T")

#: Generous: several test runs share two cores.
PATIENCE_S = 60.0
IDLE_EXIT_S = 120.0


@dataclass
class Result:
    """What came back for one request."""

    reply: dict[str, Any] = field(default_factory=dict)
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(content["text"] for kind, content in self.outputs if kind == "stream")

    @property
    def value(self) -> str:
        return "".join(
            content["data"]["text/plain"]
            for kind, content in self.outputs
            if kind == "execute_result"
        )


class Kernel:
    """A session under test and everything it said."""

    def __init__(self, session: KernelSession, events: list[Event], key: bytes) -> None:
        self.session = session
        self.events = events
        self.key = key
        self.composer = Composer(Signer(key))
        self.messages: list[tuple[Channel, tuple[bytes, ...]]] = []
        self.deaths: list[int] = []
        self._news = asyncio.Event()

    def on_message(self, channel: Channel, parts: tuple[bytes, ...]) -> None:
        self.messages.append((channel, parts))
        self._news.set()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    @property
    def request(self) -> StartRequest:
        return StartRequest(key=self.key, session="test-session", username="tester")

    def names(self) -> list[str]:
        """Names of the events so far."""
        return [event.name for event in self.events]

    def cut_link(self) -> None:
        """As the network would do it."""
        machine = self.session._record.machine
        assert machine is not None
        machine.link.drop()

    async def until(self, condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
        """Wait for news until the condition holds."""
        async with asyncio.timeout(within_s):
            while not (value := condition()):
                self._news.clear()
                await self._news.wait()
            return value

    def send(self, msg_type: str, content: dict[str, Any], channel: Channel = Channel.SHELL) -> str:
        """Send a request; its message id."""
        parts = self.composer.compose(msg_type, content, now_s=SystemClock().now_s())
        self.session.send(channel, parts)
        return header_of(parts).msg_id

    def send_code(self, code: str, *, allow_stdin: bool = False) -> str:
        return self.send(
            "execute_request",
            {
                "code": code,
                "silent": False,
                "store_history": True,
                "user_expressions": {},
                "allow_stdin": allow_stdin,
                "stop_on_error": False,
            },
        )

    def answers(self, msg_id: str) -> list[tuple[Channel, str, dict[str, Any]]]:
        """(channel, type, content) of every message with this parent, in order."""
        found = []
        for channel, parts in self.messages:
            if parent_of(parts).msg_id == msg_id:
                found.append((channel, header_of(parts).msg_type, content_of(parts)))
        return found

    def finished(self, msg_id: str) -> bool:
        kinds = [
            kind if kind != "status" else content["execution_state"]
            for _, kind, content in self.answers(msg_id)
        ]
        return "idle" in kinds and any(kind.endswith("_reply") for kind in kinds)

    async def result(self, msg_id: str, within_s: float = PATIENCE_S) -> Result:
        await self.until(lambda: self.finished(msg_id), within_s)
        result = Result()
        for _, kind, content in self.answers(msg_id):
            if kind.endswith("_reply"):
                result.reply = content
            elif kind != "status":
                result.outputs.append((kind, content))
        return result

    async def execute(self, code: str, within_s: float = PATIENCE_S) -> Result:
        return await self.result(self.send_code(code), within_s)


class Kit:
    """One local service, and kernels on it."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.profile = Profile(local_state_dir=str(state_dir))
        self.control = Control(lambda: access_of(self.profile), SystemClock())

    def run(self, steps: Callable[[Kit], Coroutine[Any, Any, T]]) -> T:
        """Run a test's coroutine on the bridge."""
        return bridge().call(steps, self)

    def changed(self, **settings: Any) -> Profile:
        """The service's profile with other settings."""
        if "max_idle_s" in settings:
            settings["idle"] = IdlePolicy(max_idle_s=settings.pop("max_idle_s"))
        return replace(self.profile, **settings)

    @asynccontextmanager
    async def kernel(
        self,
        *,
        profile: Profile | None = None,
        clock: Clock | None = None,
        control: Control | None = None,
        start: bool = True,
        folder: str | None = None,
    ) -> AsyncIterator[Kernel]:
        events = EventSink()
        key = uuid.uuid4().hex.encode()
        holder: list[Kernel] = []
        session = KernelSession(
            str(uuid.uuid4()),
            profile or self.profile,
            control or self.control,
            clock or SystemClock(),
            events,
            "tester",
            workspace_folder=folder,
            on_message=lambda channel, parts: holder[0].on_message(channel, parts),
            on_death=lambda status: holder[0].deaths.append(status),
            self_draining=True,
        )
        kernel = Kernel(session, [], key)
        holder.append(kernel)
        events.subscribe(kernel.on_event)
        try:
            if start:
                await session.start(kernel.request)
            yield kernel
        finally:
            await session.release()


@contextmanager
def running_service() -> Iterator[Kit]:
    """A service in a short folder of its own (socket paths have 108 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix="mvm-"))
    try:
        # A test run that is killed cannot stop its service: then it ends by itself, soon.
        client.ensure_running(folder, wait_s=PATIENCE_S, idle_exit_s=IDLE_EXIT_S)
        yield Kit(folder)
    finally:
        client.stop(folder)
        shutil.rmtree(folder)
