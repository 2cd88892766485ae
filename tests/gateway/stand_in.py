"""A kernel session that talks straight to a stock ipykernel over ipc: no machine, no link.

What `gateway.zmq_door` needs of a session, and nothing else, so that the door is tested alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from gateway.door_sockets import SocketReader
from gateway.messages import frames_of, split_frames
from kernel_guest.shared.errors import LinkFull
from kernel_guest.shared.messages import Channel

#: A stock kernel's own publisher drops above 1000 waiting messages; a guest's does not.
LAUNCHER = """
from ipykernel.kernelapp import IPKernelApp
class Application(IPKernelApp):
    def init_iopub(self, context):
        context.sndhwm = 0
        super().init_iopub(context)
Application.launch_instance()
"""

KINDS = {"shell": zmq.DEALER, "control": zmq.DEALER, "stdin": zmq.DEALER, "iopub": zmq.SUB}


class StandInSession:
    """Use on one loop, except ``interrupt`` and ``kill``, which are plain signals."""

    def __init__(self, key: bytes) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="door-", dir="/tmp")
        self._key = key
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._readers: list[SocketReader] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.on_message: Callable[[Channel, tuple[bytes, ...]], None] = lambda channel, parts: None
        self.consumed_bytes = 0
        self.refuse = 0

    async def start(self) -> None:
        """Start the kernel and connect to it."""
        self._launch()
        for name, kind in KINDS.items():
            self._sockets[name] = self._connect(name, kind)
            handler = self._handler(Channel[name.upper()])
            self._readers.append(SocketReader(self._sockets[name], handler))

    def _launch(self) -> None:
        place = Path(self._folder.name)
        ports = {
            f"{n}_port": i for i, n in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)
        }
        info = {
            "transport": "ipc", "ip": str(place / "k"), "key": self._key.decode(),
            "signature_scheme": "hmac-sha256", **ports,
        }  # fmt: skip
        self._ports = ports
        (place / "connection.json").write_text(json.dumps(info))
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "-f", str(place / "connection.json")],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _connect(self, name: str, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        if kind == zmq.DEALER:
            socket.identity = b"stand-in"
        else:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"ipc://{self._folder.name}/k-{self._ports[f'{name}_port']}")
        return socket

    def _handler(self, channel: Channel) -> Callable[[list[bytes]], None]:
        def handle(frames: list[bytes]) -> None:
            self.on_message(channel, split_frames(frames)[1])

        return handle

    def send(self, channel: Channel, parts: Sequence[bytes]) -> None:
        if self.refuse:
            self.refuse -= 1
            raise LinkFull("ordered", 1, 1)
        self._sockets[channel.name.lower()].send_multipart(frames_of([], parts))
        for reader in self._readers:
            reader.look()

    def consumed(self, size_bytes: int) -> None:
        self.consumed_bytes += size_bytes

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def interrupt(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    async def close(self) -> None:
        for reader in self._readers:
            reader.close()
        for socket in self._sockets.values():
            socket.close()
        self._context.term()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
