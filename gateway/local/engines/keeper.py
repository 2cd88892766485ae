"""The keeper: a small process that outlives the service by exactly one cleaning.

```
service ──packets──▶ keeper (child subreaper, own session)
   ╎                   ├── template of image A ──▶ machine init ──▶ agent, kernels, …
   ╎ control fd        └── template of image B
   └╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌▶
```

The service makes it before anything else and talks to it over a SOCK_SEQPACKET
pair.  Templates are the keeper's children, so everything that any machine
starts is among the keeper's descendants: what loses its parent comes to the
keeper.  When the pair reports end-of-file, the service is gone, `kill -9`
included: the keeper kills every machine, frozen ones too, removes their folders
and its cgroup, and ends.

Packets are JSON.  From the service:

- `{"op": "template", "argv": [...], "env": {...}, "cwd": "..."}` with two
  descriptors, the template's control socket and its log.  The word
  `{control_fd}` in argv becomes the number.  Answer: `{"pid": n}` or
  `{"error": text}`.
- `{"op": "machine", "folder": "...", "key": [pid, start time] or null}`: a machine
  lives in this folder, and this is its init once it has one.  No answer.
- `{"op": "gone", "folder": "..."}`: nothing of it is left.  No answer.

To the service: first `{"ready": true, "cgroup": path or null, "reason": text}`,
and `{"exited": pid, "status": wait status}` for every child that ended.

The state file (0600) names the cgroup, the folders and the inits, for the one case
in which nobody here cleans: keeper and service killed at the same time.  (The
templates then see the end of their control sockets and clean as far as they can.)
The next engine on this state folder calls `sweep`.

Standard library only, single-threaded, no event loop: it starts fast and has
little that can go wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gateway.local.engines import cgroups, process_tree
from gateway.local.engines.folders import remove_tree

CONTROL_FD_WORD = "{control_fd}"
#: Largest packet: argv and environment of a template.
PACKET_BYTES = 256 * 1024
#: A cleaning that takes longer than this is reported and given up.
CLEAN_WITHIN_S = 10.0
#: prctl(2), Linux 3.4: orphans of my descendants become my children.
PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Whether the system knows child subreapers (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    failed: int = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return failed == 0


class Keeper:
    def __init__(self, channel: socket.socket, state_file: Path) -> None:
        self._channel = channel
        self._state_file = state_file
        self._machines: dict[str, list[Any] | None] = {}
        self._group: Path | None = None

    def prepare(self, name: str, *, use_cgroup: bool) -> None:
        """Find the best confinement and tell the service."""
        reason = "switched off by a setting"
        if use_cgroup:
            try:
                self._group = cgroups.make_root(name)
                reason = ""
            except cgroups.NoCgroupError as error:
                reason = str(error)
        self._write_state()
        group = str(self._group) if self._group else None
        self._send({"ready": True, "cgroup": group, "reason": reason})

    def serve(self, wakeup_fd: int) -> None:
        """Until the service has gone."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(wakeup_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if wakeup_fd in ready:
                signums = os.read(wakeup_fd, 4096)
                self.reap()
                if signal.SIGTERM in signums:
                    return
            if self._channel.fileno() in ready and not self._receive():
                return

    def _receive(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, PACKET_BYTES, 8)
        except ConnectionResetError:
            return False
        if not data:
            return False
        try:
            self._obey(json.loads(data), fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _obey(self, packet: dict[str, Any], fds: list[int]) -> None:
        if packet["op"] == "machine":
            self._machines[packet["folder"]] = packet["key"]
            self._write_state()
        elif packet["op"] == "gone":
            self._machines.pop(packet["folder"], None)
            self._write_state()
        elif packet["op"] == "template":
            try:
                self._send({"pid": spawn(packet, fds, self._group)})
            except OSError as error:
                self._send({"error": str(error)})

    def reap(self) -> None:
        """Collect every child that has ended and report it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"exited": pid, "status": status})

    def _send(self, packet: dict[str, Any]) -> None:
        # A service that has gone cannot be told; its end-of-file is on the way.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(json.dumps(packet).encode())

    def _write_state(self) -> None:
        me = process_tree.read_process(os.getpid())
        state = {
            "pid": os.getpid(),
            "started": me.started if me else "",
            "cgroup": str(self._group) if self._group else None,
            "machines": self._machines,
        }
        draft = self._state_file.with_suffix(".new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(state, file)
        draft.replace(self._state_file)

    def clean(self) -> None:
        """Kill every machine and template, remove folders, group and state file.

        What withstands is said in the log and left in the state file for `sweep`.
        """
        me, reap, within_s = os.getpid(), self.reap, CLEAN_WITHIN_S
        steps: list[Callable[[], object]] = []
        if self._group is not None:
            kill = partial(cgroups.kill_and_remove, within_s=within_s, between=reap)
            steps.append(partial(kill, self._group))
        steps.append(
            partial(process_tree.kill_family, [me], within_s=within_s, spare=me, between=reap)
        )
        steps += [partial(remove_tree, Path(folder)) for folder in self._machines]
        if all([succeeds(step) for step in steps]):  # noqa: C419 - every step is tried
            self._state_file.unlink(missing_ok=True)


def succeeds(step: Callable[[], object]) -> bool:
    """Do one step of a cleaning that goes on whatever happens."""
    try:
        step()
    except (OSError, process_tree.SurvivorsError) as error:
        print(f"keeper {os.getpid()}: {error}", file=sys.stderr)
        return False
    return True


def spawn(packet: dict[str, Any], fds: list[int], group: Path | None) -> int:
    """Fork a template; returns its pid.  Raises OSError when it cannot be forked."""
    control_fd, log_fd = fds
    argv = [str(control_fd) if word == CONTROL_FD_WORD else word for word in packet["argv"]]
    pid = os.fork()
    if pid == 0:
        _become(argv, packet, control_fd, log_fd, group)
    return pid


def _become(
    argv: list[str], packet: dict[str, Any], control_fd: int, log_fd: int, group: Path | None
) -> NoReturn:
    """In the child: group, descriptors, signals, then the program itself."""
    try:
        if group is not None:
            cgroups.join(group / cgroups.TEMPLATES)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.set_inheritable(control_fd, True)
        os.chdir(packet["cwd"])
        os.execve(argv[0], argv, packet["env"])  # noqa: S606 - a list, no shell
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def sweep(state_file: Path) -> None:
    """Clean up after a keeper that could not do it.  Blocks.

    A keeper that still lives is cleaning at this moment: wait for it.  Called by an
    engine before it makes its own keeper; only one service uses a state folder at a time.
    Raises SurvivorsError or OSError.
    """
    if not state_file.exists():
        return
    state = json.loads(state_file.read_text())
    process_tree.wait_gone([(state["pid"], state["started"])], within_s=CLEAN_WITHIN_S)
    if not state_file.exists():
        return
    if state["cgroup"]:
        cgroups.kill_and_remove(Path(state["cgroup"]), within_s=CLEAN_WITHIN_S)
    inits = {(key[0], key[1]) for key in state["machines"].values() if key}
    process_tree.kill_family(process_tree.still_there(inits), within_s=CLEAN_WITHIN_S)
    for folder in state["machines"]:
        remove_tree(Path(folder))
    state_file.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="gateway.local.engines.keeper")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--state-file", type=Path, required=True)
    parser.add_argument("--name", required=True, help="name of the cgroup to be made")
    parser.add_argument("--no-cgroup", action="store_true")
    options = parser.parse_args(arguments)
    become_subreaper()
    # A terminal's Ctrl-C and hang-up are the service's business; its end reaches us by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wakeup, wakeup_end = socket.socketpair()
    wakeup_end.setblocking(False)
    signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    os.set_inheritable(options.channel_fd, False)  # a template that held it would hide our end
    with wakeup, wakeup_end, socket.socket(fileno=options.channel_fd) as channel:
        keeper = Keeper(channel, options.state_file)
        keeper.prepare(options.name, use_cgroup=not options.no_cgroup)
        keeper.serve(wakeup.fileno())
        keeper.clean()


if __name__ == "__main__":
    main()
