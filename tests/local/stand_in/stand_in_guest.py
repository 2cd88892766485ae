"""A guest of a few lines: the template's protocol, and a machine that answers small HTTP requests.

Run as `python -m stand_in_guest template --control-fd N`, like the real one.  The machine's
init serves one request per connection on its agent and hook listeners:

- `GET /health`: its pid, its environment and its cgroup
- `GET /daemon?<path>`: double-forks a child with its own session that appends to <path> for ever
- `GET /script?<file>,<argument>`: starts a Python file as a child
- `GET /exit?<n>`: the init ends
- any POST on the hook listener: 200 and a line in the log, or the status in HOOK_STATUS
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path


def template(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, wake_end = socket.socketpair()
    wake_end.setblocking(False)
    signal.set_wakeup_fd(wake_end.fileno())
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            report_exits(control)
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, 65536, 8)
            if not data:
                return
            packet = json.loads(data)
            if packet["op"] == "ping":
                control.send(b'{"ok": true, "modules": 1}')
            else:
                pid = os.fork()
                if pid == 0:
                    machine(packet, fds)
                control.send(json.dumps({"pid": pid}).encode())
            for fd in fds:
                os.close(fd)


def report_exits(control: socket.socket) -> None:
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            control.send(json.dumps({"exited": found[0], "status": found[1]}).encode())
    except ChildProcessError:
        return


def machine(packet: dict, fds: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    os.setsid()
    if packet["cgroup"]:
        (Path(packet["cgroup"]) / "cgroup.procs").write_text("0")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    os.environ.update(packet["env"])
    os.dup2(fds[2], 1)
    os.dup2(fds[2], 2)
    if os.environ.get("INIT_ENDS"):
        os._exit(3)
    listeners = [socket.socket(fileno=os.dup(fd)) for fd in fds[:2]]
    while True:
        for listener in select.select(listeners, [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                serve(connection, hook=listener is listeners[1])


def serve(connection: socket.socket, *, hook: bool) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        data = connection.recv(65536)
        if not data:
            return
        head += data
    method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
    path, _, argument = target.partition("?")
    status, body = 200, b""
    if hook:
        status = int(os.environ.get("HOOK_STATUS", "200"))
        print(method, path, flush=True)
    elif path == "/daemon":
        body = daemon(argument).encode()
    elif path == "/script":
        script(*argument.split(","))
    elif path == "/exit":
        os._exit(int(argument))
    else:
        facts = {
            "pid": os.getpid(),
            "environ": dict(os.environ),
            "cgroup": Path("/proc/self/cgroup").read_text(),
        }
        body = json.dumps(facts).encode()
    connection.sendall(
        b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (status, len(body), body)
    )


def script(*words: str) -> None:
    """Run a Python file as a child."""
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, *words], {})


def daemon(path: str) -> str:
    """Pid of a grandchild that nobody waits for, in a session of its own."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(write_end, str(pid).encode())
            os._exit(0)
        # Environment and descriptors of the machine are gone from it, as with a real daemon.
        os.execve(
            sys.executable,
            [sys.executable, "-c", BEATING, path],
            {},
        )
    os.wait()
    return os.read(read_end, 100).decode()


BEATING = """
import sys, time
while True:
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.002)
"""

if __name__ == "__main__":
    assert sys.argv[1] == "template"
    if os.environ.get("TEMPLATE_FAILS"):
        time.sleep(0)
        sys.exit("RuntimeError: " + os.environ["TEMPLATE_FAILS"])
    with socket.socket(fileno=int(sys.argv[3])) as fd:
        template(fd)
