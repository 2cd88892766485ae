"""A template whose agent hands its side of the machine's socket to the test.

    python tests/guest/stand_in_template.py CONTROL_FD

Everything is real but the agent, which accepts one connection on its listener, sends the socket
to the machine's init over it, and lives until that connection closes. With `--exit N` among the
bytes it receives it ends with that status instead.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

del sys.path[0]  # this folder is not on a kernel's path

from kernel_guest import template  # noqa: E402


def stand_in_agent(
    agent_listener: socket.socket, hook_listener: socket.socket, host: socket.socket, folder: Path
) -> None:
    connection, _ = agent_listener.accept()
    socket.send_fds(connection, [b"host"], [host.fileno()])
    host.close()
    if connection.recv(100) == b"exit":
        os._exit(3)


def main() -> None:
    role = template.serve(int(sys.argv[1]), agent=stand_in_agent)
    while role is not None:
        role = role()


if __name__ == "__main__":
    main()
