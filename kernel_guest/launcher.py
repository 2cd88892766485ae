"""Runs ipykernel for a machine: in a fork of the template, or cold as a program of its own.

A kernel of ours is the stock application (`IPKernelApp`) with the stock kernel in it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Like ipykernel_launcher: nothing in the working folder may shadow what we load.
    # InteractiveShellApp.init_path adds the folder again.
    import pathlib

    if sys.path[0] == "" or pathlib.Path(sys.path[0]) == pathlib.Path.cwd():
        del sys.path[0]

import importlib.util
import locale
import os
import tempfile
import time
from contextlib import suppress
from typing import Any, NoReturn

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import IPKernelApp

from kernel_guest import processes
from kernel_guest.kernels import Launch

LOG_NAME = "kernel.log"


class GuestKernelApp(IPKernelApp):
    """The stock application, with a publisher that blocks instead of dropping."""

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Skip 10 ms of building a parser when there is nothing to parse."""
        if argv is None or argv:
            super().parse_command_line(argv)

    def init_iopub(self, context: zmq.Context[Any]) -> None:
        self.iopub_socket = context.socket(zmq.XPUB)
        self.iopub_socket.linger = 1000
        self.iopub_socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.iopub_port = self._bind_socket(self.iopub_socket, self.iopub_port)  # type: ignore[no-untyped-call]
        self.configure_tornado_logger()  # type: ignore[no-untyped-call]
        self.iopub_thread = IOPubThread(self.iopub_socket, pipe=True, session=self.session)  # type: ignore[no-untyped-call]
        self.iopub_thread.start()  # type: ignore[no-untyped-call]
        self.iopub_socket = self.iopub_thread.background_socket

    def log_connection_info(self) -> None:
        """Note the ports, without the advice for people at a terminal."""
        self._ports = {name.removesuffix("_port"): getattr(self, name) for name in _PORTS}


_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


def run(launch: Launch) -> None:
    """The life of a forked kernel. Called once, at the bottom of the stack of a fresh fork."""
    become_kernel(launch)
    app = GuestKernelApp.instance(
        connection_file=launch.connection_file,
        transport=launch.connection.transport,
        ip=launch.connection.ip,
        **launch.connection.ports(),
    )
    app.session.key = launch.request.key.encode()
    app.session.signature_scheme = launch.request.signature_scheme
    app.initialize(list(launch.request.extra_arguments))  # type: ignore[no-untyped-call]
    app.start()  # type: ignore[no-untyped-call]


def become_kernel(launch: Launch) -> None:
    """Make this fork what a freshly started interpreter would be."""
    _become_process(launch)
    os.environ.clear()
    os.environ.update(launch.env)
    _forget_what_the_template_knew()
    sys.argv = [_stock_launcher(), *launch.argv[launch.argv.index("-f") :]]
    sys.orig_argv = [sys.executable, "-m", "ipykernel_launcher", *sys.argv[1:]]


def execute(launch: Launch, trouble_fd: int) -> NoReturn:
    """Become another program; says why on `trouble_fd` if that fails. Called in a fork."""
    try:
        _become_process(launch, keep=[trouble_fd])
        os.execvpe(launch.argv[0], launch.argv, launch.env)  # noqa: S606 - a kernelspec's command
    except OSError as error:
        os.write(trouble_fd, (error.strerror or repr(error)).encode())
    finally:
        os._exit(127)


def _become_process(launch: Launch, keep: list[int] | None = None) -> None:
    """Own session, default signals, own standard files, nothing inherited, working folder."""
    os.setsid()
    processes.reset_signals()
    log = os.open(launch.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    processes.redirect_standard_fds(log)
    processes.close_inherited_fds(keep or ())
    os.chdir(launch.request.cwd)


def _forget_what_the_template_knew() -> None:
    """Undo what modules remember of the template: its randomness, its environment."""
    time.tzset()
    with suppress(locale.Error):  # an unknown LC_* value: Python itself goes on with C
        locale.setlocale(locale.LC_CTYPE, "")
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    for path in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[path]  # a folder that did not exist then may exist now
    _reseed()


def _reseed() -> None:
    """Randomness of our own; `random` reseeds itself after a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


def _stock_launcher() -> str:
    """What sys.argv[0] is in a stock kernel."""
    spec = importlib.util.find_spec("ipykernel_launcher")
    return spec.origin if spec is not None and spec.origin else "ipykernel_launcher"


if __name__ == "__main__":
    sys.argv[0] = _stock_launcher()
    GuestKernelApp.launch_instance()
