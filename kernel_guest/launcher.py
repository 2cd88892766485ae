"""Runs ipykernel for a machine: in a fork of the template, or cold as a program of its own.

A kernel of ours is the stock application with the stock kernel and shell in it; notebooks see what
`python -m ipykernel_launcher -f FILE` would show them. Four things differ on purpose:

- the publisher blocks instead of dropping (`publisher`);
- an interrupt reaches a cell that awaits at once;
- nothing is printed about how to connect;
- the end of the parent ends the kernel at once, by the operating system instead of by a thread
  that polls (`processes.fork`), and JPY_PARENT_PID is not set.

**What a fork must not keep.** The template's signals, session, descriptors, argv, environment and
randomness, and what modules computed from them when they were imported. `_take_identity` goes
through that list; `tests/guest/test_launcher_stock.py` compares the result with a stock kernel.
What cannot be undone is the seed of `hash()`, which all forks of a template share: a kernel whose
environment sets PYTHONHASHSEED is therefore cold (`kernels`).

**Fast path.** Parsing the arguments costs more than any other single step of a start (building
the parser takes 10 ms), and nearly always they are just `-f FILE`. That case is written out.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Like ipykernel_launcher: nothing in the working folder may shadow what we load.
    # InteractiveShellApp.init_path adds the folder again.
    import pathlib

    if sys.path[0] == "" or pathlib.Path(sys.path[0]) == pathlib.Path.cwd():
        del sys.path[0]

import os

# ipykernel reads it when it is imported. The service may have been started from a kernel, whose
# parent has nothing to do with ours.
os.environ.pop("JPY_PARENT_PID", None)

import importlib.util
import locale
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import zmq
from ipykernel.kernelapp import IPKernelApp
from tornado.ioloop import IOLoop
from traitlets import default
from traitlets.config import Config

from kernel_guest import processes, publisher
from kernel_guest.kernels import CHANNELS, LOG_NAME, Launch, SpawnRequest
from kernel_guest.spare import Seat, configured

_INLINE_BACKEND = "module://matplotlib_inline.backend_inline"


class GuestKernelApp(IPKernelApp):
    """`IPKernelApp` with a publisher that blocks instead of dropping."""

    seat: Seat | None = None
    """Set in a spare, before `initialize`."""

    @default("outstream_class")
    def _outstream_class_default(self) -> str:
        return "kernel_guest.publisher.OutStream"

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """As stock; `-f FILE` alone does not need a parser."""
        if argv is None or len(argv) != 2 or argv[0] != "-f":
            super().parse_command_line(argv)
            return
        self.argv = argv
        # Code asks `"IPKernelApp" in get_ipython().config` to know that it is in a kernel.
        self.cli_config = Config({"IPKernelApp": {"connection_file": argv[1]}})
        self.update_config(deepcopy(self.cli_config))

    def init_connection_file(self) -> None:
        """As stock; a spare knows where it listens and nothing else yet."""
        if self.seat is None:
            super().init_connection_file()  # type: ignore[no-untyped-call]
        else:
            self.load_connection_info(self.seat.connection())  # type: ignore[arg-type]
        self._read_username()

    def _read_username(self) -> None:
        """jupyter_client reads it when it is imported, which was in the template."""
        if "username" not in self.config.get("Session", {}):
            self.session.username = os.environ.get("USER", "username")

    def write_connection_file(self, **kwargs: Any) -> None:
        """As stock; a spare's is written by the machine when there is a key to write."""
        if self.seat is None:
            super().write_connection_file(**kwargs)

    def init_extensions(self) -> None:
        """The first step that may run code of the user's: here a spare waits for its request."""
        if self.seat is not None:
            self._sit_down(self.seat)
        super().init_extensions()  # type: ignore[no-untyped-call]

    def _sit_down(self, seat: Seat) -> None:
        """Wait for the request, and become its kernel."""
        request, env = seat.wait()
        if configured(self.config_file_paths):
            os._exit(0)  # a fork will read it in its place
        _take_identity(request, env, seat.connection_file)
        self.session.key = request.key.encode()
        self.session.signature_scheme = request.signature_scheme
        self._read_username()
        shell: Any = self.shell
        # What the prepared half had set in the environment, and read from it.
        shell.init_environment()
        os.environ.setdefault("MPLBACKEND", _INLINE_BACKEND)
        shell.starting_dir = os.getcwd()
        if session_name := os.environ.get("JPY_SESSION_NAME"):
            shell.user_ns["__session__"] = session_name
        seat.taken()

    def init_iopub(self, context: zmq.Context[Any]) -> None:
        """As stock, with our socket options and our thread."""
        iopub = context.socket(zmq.XPUB)
        publisher.prepare_socket(iopub)
        self._apply_curve_server_options(iopub)
        self.iopub_port = self._bind_socket(iopub, self.iopub_port)  # type: ignore[no-untyped-call]
        self.configure_tornado_logger()  # type: ignore[no-untyped-call]
        self.iopub_thread = publisher.IOPubThread(iopub, self.session)
        self.iopub_thread.start()  # type: ignore[no-untyped-call]
        self.iopub_socket = self.iopub_thread.background_socket

    def start(self) -> None:
        """As stock, on a loop that a signal wakes.

        ipykernel cancels an awaiting cell upon SIGINT by a callback that it adds from the signal
        handler; nothing wakes the loop for it (ipykernel 7.4, tornado 6.6: `await asyncio.sleep(5)`
        ends after five seconds). A byte on a descriptor of the loop does.
        """
        woken, self._waker = socket.socketpair()
        for end in (woken, self._waker):
            end.setblocking(False)
        IOLoop.current().add_handler(woken, _drain, IOLoop.READ)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        super().start()  # type: ignore[no-untyped-call]

    def log_connection_info(self) -> None:
        """Note the ports; the advice for people at a terminal has no reader here."""
        self._ports = {channel: getattr(self, f"{channel}_port") for channel in CHANNELS}


def _drain(end: socket.socket, _: int) -> None:
    end.recv(4096)


def run(launch: Launch) -> None:
    """The life of a forked kernel. Called once, at the bottom of the stack of a fresh fork."""
    _become_process(launch.folder, launch.request.cwd)
    _take_identity(launch.request, launch.env, launch.connection_file)
    app: Any = GuestKernelApp.instance()
    app.initialize(sys.argv[1:])
    app.start()


def run_spare(seat: Seat) -> None:
    """The life of a kernel that is prepared before it is asked for. Called like `run`."""
    _become_process(seat.folder, str(seat.folder), keep=[seat.channel.fileno()])
    app: Any = GuestKernelApp.instance()
    app.seat = seat
    app.initialize(["-f", seat.connection_file])
    app.start()


def execute(launch: Launch, trouble_fd: int) -> NoReturn:
    """Become another program; says why on `trouble_fd` if that fails. Called in a fork."""
    try:
        _become_process(launch.folder, launch.request.cwd, keep=[trouble_fd])
        os.execvpe(launch.argv[0], launch.argv, launch.env)  # noqa: S606 - a kernelspec's command
    except OSError as error:
        os.write(trouble_fd, (error.strerror or repr(error)).encode())
    finally:
        os._exit(127)


def _become_process(folder: Path, cwd: str, keep: Collection[int] = ()) -> None:
    """Own session, default signals, own standard files, nothing inherited, working folder."""
    os.setsid()
    processes.reset_signals()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(folder / LOG_NAME, flags, 0o600)
    processes.redirect_standard_fds(log)
    processes.close_inherited_fds(keep)
    os.chdir(cwd)


def _take_identity(request: SpawnRequest, env: Mapping[str, str], connection_file: str) -> None:
    """Make this fork what an interpreter would be that was started for `request`."""
    os.environ.clear()
    os.environ.update(env)
    _see_installed_packages()
    os.chdir(request.cwd)
    _forget_what_was_read_once()
    _reseed()
    sys.argv = [_STOCK_LAUNCHER, "-f", connection_file, *request.extra_arguments]
    sys.orig_argv = [sys.executable, "-m", "ipykernel_launcher", *sys.argv[1:]]


def _forget_what_was_read_once() -> None:
    """Read again what modules read from the environment when they were imported."""
    time.tzset()
    with suppress(locale.Error):  # an unknown LC_* value: Python itself goes on with C
        locale.setlocale(locale.LC_CTYPE, "")
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if "matplotlib" in sys.modules:
        backend = os.environ.get("MPLBACKEND") or _INLINE_BACKEND
        sys.modules["matplotlib"].rcParams["backend"] = backend


def _see_installed_packages() -> None:
    """What `pip install` puts into the workspace can be imported at once, here and in children.

    The agent sets PIP_TARGET (workspace.py). It sets PYTHONPATH, which would make the kernel a cold
    one, only when something is installed there.
    """
    target = os.environ.get("PIP_TARGET")
    if target and target not in sys.path:
        # Behind the working folder, which a spare kernel has on its path already.
        sys.path.insert(int(sys.path[:1] == [""]), target)
        rest = [path for path in [os.environ.get("PYTHONPATH")] if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([target, *rest])


def _reseed() -> None:
    """Randomness of our own; `random` reseeds itself after a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


def _stock_launcher() -> str:
    spec = importlib.util.find_spec("ipykernel_launcher")
    return spec.origin if spec is not None and spec.origin else "ipykernel_launcher"


_STOCK_LAUNCHER = _stock_launcher()
"""What sys.argv[0] is in a stock kernel: notebooks that parse arguments expect it."""


if __name__ == "__main__":
    _see_installed_packages()
    sys.argv[0] = _STOCK_LAUNCHER
    GuestKernelApp.launch_instance()
