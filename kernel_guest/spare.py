"""A kernel that is prepared before it is asked for.

Half of a kernel's start does not depend on whose kernel it is: sockets, threads, the shell and its
history, and the copying of pages that a fork shares with its parent. A machine forks such a spare
as soon as it has forked its agent, while the agent comes up and the gateway connects, and hands the
first request to it. Later kernels (restarts) are forked when they are asked for; a machine keeps
no spare that it may never need.

What is prepared, and what is not. The spare runs the stock `initialize` up to the point where
extensions and startup files would be loaded, and waits there (`launcher`). Everything that can be
seen of the request is set after that point: key, environment, working folder, argv, randomness.
What the prepared half has already read is compared here, and when the request differs the spare is
dropped and an ordinary fork takes its place:

- arguments: they configure objects that exist already;
- variables that name the home, the profile or a virtual environment;
- configuration files of IPython: they are code, and run in the kernel's own circumstances.

A spare that died, or that does not answer within ANSWER_S, is dropped the same way, so it can only
make a start faster, never impossible. A snapshot of a MicroVM holds no spare: in the image the
first fork comes after `/run`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernel_guest import processes
from kernel_guest.kernels import Kind, Launch, SpawnRequest, connection_file, connection_of

NUMBER = 0
"""Kernels that are asked for count from one."""

# Preparing takes 50 ms, ten times that on a busy machine; the agent waits for twice as long.
ANSWER_S = 5.0

# Fits the socket's buffer, so that the machine never waits for a spare that is not listening yet.
_MAX_MESSAGE_BYTES = 64 * 1024

_READ_EARLY = re.compile(
    r"HOME|USERPROFILE|PROGRAMDATA|VIRTUAL_ENV|IPYTHON.*|JUPYTER.*|IPYKERNEL.*|XDG_.*"
)
_CONFIG_NAMES = ("ipython_config", "ipython_kernel_config")


@dataclass(frozen=True, slots=True)
class Seat:
    """The spare's side: where it will listen, and from where it hears whose it is."""

    folder: Path
    channel: socket.socket

    @property
    def connection_file(self) -> str:
        """Does not exist before the request does."""
        return str(connection_file(self.folder, NUMBER))

    def connection(self) -> dict[str, Any]:
        """All but the key."""
        connection = connection_of(self.folder, NUMBER)
        return {**connection.ports(), "transport": connection.transport, "ip": connection.ip}

    def wait(self) -> tuple[SpawnRequest, dict[str, str]]:
        """Block until the request comes; out: it and the whole environment of its kernel."""
        data = bytearray()
        while not data.endswith(b"\n"):
            piece = self.channel.recv(_MAX_MESSAGE_BYTES)
            if not piece:
                os._exit(0)  # dropped
            data += piece
        message = json.loads(data)
        return SpawnRequest.from_json(message["request"]), message["env"]

    def taken(self) -> None:
        """Tell the machine that the kernel is the request's from here on."""
        self.channel.sendall(b"\n")
        self.channel.close()


class Spare:
    """The machine's side of one spare."""

    def __init__(self, pid: int, channel: socket.socket, environ: Mapping[str, str]) -> None:
        self.pid = pid
        self.channel = channel
        self._environ = dict(environ)
        self.launch: Launch | None = None
        self.call_id = 0
        self.asked_at_s = 0.0

    def __repr__(self) -> str:
        return f"<Spare pid={self.pid} {'asked' if self.launch else 'waiting'}>"

    def ask(self, call_id: int, launch: Launch) -> bool:
        """Hand `launch` over; False if it must not, or cannot, become this spare's."""
        if self.launch is not None or not self._suits(launch):
            return False
        message = {"request": launch.request.to_json(), "env": dict(launch.env)}
        line = json.dumps(message).encode() + b"\n"
        if len(line) > _MAX_MESSAGE_BYTES:
            return False
        with suppress(BrokenPipeError, ConnectionResetError):
            self.channel.sendall(line)
            self.launch, self.call_id = replace(launch, kind=Kind.SPARE), call_id
            self.asked_at_s = time.monotonic()
            return True
        return False

    def _suits(self, launch: Launch) -> bool:
        if launch.kind is not Kind.FORK or launch.request.extra_arguments:
            return False
        names = launch.env.keys() | self._environ.keys()
        changed = {name for name in names if launch.env.get(name) != self._environ.get(name)}
        return not any(_READ_EARLY.fullmatch(name) for name in changed)

    def answered(self) -> bool:
        """Whether it took the request; asked when the channel is readable."""
        with suppress(ConnectionResetError):
            return self.channel.recv(1) == b"\n"
        return False

    def remaining_s(self) -> float | None:
        """How much longer an answer is waited for; None when nothing was asked."""
        if self.launch is None:
            return None
        return max(0.0, self.asked_at_s + ANSWER_S - time.monotonic())

    def close(self) -> None:
        """Let go of a spare that has become a kernel."""
        self.channel.close()

    def drop(self) -> None:
        """End a spare that is not needed."""
        processes.kill_quietly(self.pid, signal.SIGKILL)
        self.close()


def configured(folders: list[str]) -> bool:
    """Whether IPython would read a configuration file in one of `folders`."""
    return any(
        Path(folder, f"{name}{suffix}").exists()
        for folder in folders
        for name in _CONFIG_NAMES
        for suffix in (".py", ".json")
    )
