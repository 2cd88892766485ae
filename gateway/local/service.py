"""The local service's process: `python -m gateway.local.service --state-dir D`.

One asyncio loop holds the control API, every machine's proxy and the engine's
ends of the pipes.  Order of the start: folder, lock, state, key pair, port,
engine, listeners, and only then `service.json`; the end goes the other way.
Problems are one sentence on stderr and an exit code: 2 for a wrong argument, 3
for everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from gateway.errors import LocalServiceTrouble
from gateway.local.api.context import Context
from gateway.local.api.model import load_model
from gateway.local.api.paging import Pager
from gateway.local.api.rates import RateLimiter
from gateway.local.api.server import ApiServer
from gateway.local.api.signature import KeyPair, SignatureChecker
from gateway.local.behaviours import implements
from gateway.local.client import ServiceInfo, StateFolder, state_folder, write_info
from gateway.local.clock import Clock, SystemClock
from gateway.local.effects import answer_faults
from gateway.local.engines.folders import remove_tree
from gateway.local.engines.process import ProcessEngine
from gateway.local.faults import FaultBoard
from gateway.local.fleet import Fleet
from gateway.local.images.artifact import S3Access
from gateway.local.images.builder import Builder
from gateway.local.images.catalog import Catalog
from gateway.local.interfaces import Engine
from gateway.local.machines import ProxyMaker, Surroundings
from gateway.local.proxy import MachineProxy
from gateway.local.settings import (
    ACCOUNT,
    OTHER_RATE_PER_S,
    PRESETS,
    RATES_PER_S,
    REGION,
    ServiceSettings,
    SettingError,
    preset_settings,
)
from gateway.local.state import State, StateError
from gateway.local.tokens import TokenSmith

log = logging.getLogger(__name__)

_LOCK_ATTEMPTS = 10
_LOCK_PAUSE_S = 0.05
#: A machine's `run` folder must stay below 60 bytes, because of unix socket paths.
_LONGEST_MACHINES_DIR = 60 - len("/0123456789ab/run") - 1
_ROOM_FOR_MACHINES = Path("/tmp")  # noqa: S108  # mkdtemp makes a private folder in it
_BACKLOG = 1024
LOG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """What a test may replace: the engine, the proxy, the faults and time."""

    make_engine: Callable[[Path], Engine]
    make_proxy: ProxyMaker
    faults: FaultBoard
    clock: Clock


def default_parts() -> Parts:
    """The real parts."""
    clock = SystemClock()
    return Parts(ProcessEngine, MachineProxy, FaultBoard(clock), clock)


class Service:
    """A service, from its folder to its end.  Use `serving()`."""

    def __init__(self, folder: StateFolder, settings: ServiceSettings, parts: Parts) -> None:
        self._folder = folder
        self._settings = settings
        self._parts = parts
        self.context: Context | None = None
        self._stop = asyncio.Event()
        self._last_request_s = parts.clock.monotonic_s()

    @contextlib.asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncIterator[ServiceInfo]:
        """Serve while the block runs.  Raises LocalServiceTrouble."""
        async with contextlib.AsyncExitStack() as stack:
            self._folder.make()
            stack.enter_context(held_lock(self._folder))
            state = _open_state(self._folder)
            stack.callback(state.close)
            listener = _bind(state, port)
            stack.callback(listener.close)
            machines_dir = _machines_dir(self._folder, state)
            stack.callback(remove_tree, machines_dir)
            server, keys = await self._assemble(stack, state, machines_dir)
            server.listen([listener])
            stack.push_async_callback(server.close)
            info = self._info(listener, keys)
            write_info(self._folder, info)
            stack.callback(self._folder.info.unlink, missing_ok=True)
            yield info

    async def _assemble(
        self, stack: contextlib.AsyncExitStack, state: State, machines_dir: Path
    ) -> tuple[ApiServer, KeyPair]:
        """Make the rooms of the house; whatever has an end is pushed on the stack."""
        parts, settings = self._parts, self._settings
        engine = parts.make_engine(self._folder.path)
        stack.push_async_callback(engine.close)
        smith = TokenSmith()
        around = Surroundings(
            engine, state, parts.clock, settings, smith, parts.faults, parts.make_proxy
        )
        builder = Builder(
            engine, parts.clock, self._folder.path / "images", S3Access.from_environment(REGION)
        )
        fleet = Fleet(around, machines_dir=machines_dir, logs_dir=_logs_dir(self._folder))
        catalog = Catalog(state, parts.clock, settings, builder, fleet.uses_image)
        fleet.sweep_records()
        catalog.recover()
        stack.push_async_callback(catalog.close)
        stack.push_async_callback(fleet.close)
        self.context = Context(
            state, parts.clock, fleet, catalog, smith, parts.faults, Pager(), REGION, ACCOUNT
        )
        keys = _key_pair(state)
        return self._server(self.context, keys), keys

    @implements("rates")
    def _server(self, context: Context, keys: KeyPair) -> ApiServer:
        model = load_model()
        limiter = RateLimiter(RATES_PER_S, OTHER_RATE_PER_S) if self._settings.throttle else None
        checker = SignatureChecker(keys, region=REGION, service=model.signing_name)
        return ApiServer(
            context,
            model,
            checker,
            limiter,
            on_request=self._note_request,
            internal={"/_local/faults": answer_faults},
        )

    def _info(self, listener: socket.socket, keys: KeyPair) -> ServiceInfo:
        return ServiceInfo(
            endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            region=REGION,
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            pid=os.getpid(),
            started_at=self._parts.clock.now_s(),
            preset=self._settings.preset,
        )

    # -- when to end

    def stop(self) -> None:
        """Ask for the end; `until_stopped` returns."""
        self._stop.set()

    async def until_stopped(self, idle_exit_s: float | None) -> None:
        """Wait for `stop`, or for `idle_exit_s` without a request and without a machine."""
        if idle_exit_s is not None:
            self._watch_idle(idle_exit_s)
        await self._stop.wait()

    def _note_request(self) -> None:
        self._last_request_s = self._parts.clock.monotonic_s()

    def _watch_idle(self, idle_exit_s: float) -> None:
        clock = self._parts.clock
        assert self.context is not None
        if self.context.fleet.live or self.context.catalog.busy:
            self._note_request()
        left_s = self._last_request_s + idle_exit_s - clock.monotonic_s()
        if left_s <= 0:
            log.info("nothing to do for %g s: ending", idle_exit_s)
            self.stop()
        else:
            clock.call_later(left_s, lambda: self._watch_idle(idle_exit_s))


# -- the parts of the start


@contextlib.contextmanager
def held_lock(folder: StateFolder) -> Iterator[None]:
    """Hold the folder's lock, or say that another service does.

    A reader that asks whether the lock is held takes it for an instant, hence the
    few attempts.
    """
    fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _lock(fd):
            raise LocalServiceTrouble(
                f"another one is already running with the state folder {folder.path}; "
                "`jupyter microvm local status` shows it."
            )
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    return False


def _open_state(folder: StateFolder) -> State:
    try:
        return State(folder.database)
    except StateError as error:
        raise LocalServiceTrouble(str(error)) from error


def _key_pair(state: State) -> KeyPair:
    """The folder's key pair, made once, so that exported variables survive a restart."""
    access, secret = state.meta("access_key_id"), state.meta("secret_access_key")
    if access is None or secret is None:
        access = "AKIALOCAL" + secrets.token_hex(6).upper()[:11]
        secret = secrets.token_urlsafe(30)
        state.set_meta("access_key_id", access)
        state.set_meta("secret_access_key", secret)
    return KeyPair(access, secret)


def _bind(state: State, port: int | None) -> socket.socket:
    """The listener: the port asked for, else the last one, else any."""
    wanted = port if port is not None else int(state.meta("port") or 0)
    try:
        listener = _listener(wanted)
    except OSError as error:
        if port is not None:
            raise LocalServiceTrouble(
                f"port {port} cannot be used ({error.strerror}); "
                "leave out --port to get a free one."
            ) from error
        listener = _listener(0)
    state.set_meta("port", str(listener.getsockname()[1]))
    return listener


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _machines_dir(folder: StateFolder, state: State) -> Path:
    """A private folder with a short path; what a dead service left in it is removed."""
    _sweep(state.meta("machines_dir"))
    place = folder.path / "machines"
    if len(os.fsencode(place)) > _LONGEST_MACHINES_DIR:
        place = Path(tempfile.mkdtemp(prefix="mvm-", dir=_ROOM_FOR_MACHINES))
    else:
        remove_tree(place)
        place.mkdir(mode=0o700)
    state.set_meta("machines_dir", str(place))
    return place


def _sweep(left: str | None) -> None:
    """Remove an earlier service's machines folder if it is still ours."""
    if left is None:
        return
    path = Path(left)
    with contextlib.suppress(OSError):
        status = path.lstat()
        if status.st_uid == os.getuid() and not path.is_symlink():
            remove_tree(path)


def _logs_dir(folder: StateFolder) -> Path:
    place = folder.path / "logs"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


# -- the process


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the end; returns the exit code."""
    options = _parse(arguments)
    try:
        settings = preset_settings(options.preset, options.switches)
    except SettingError as error:
        return _complain(str(error), 2)
    if options.detach and os.fork():
        os._exit(0)  # the starter waits for us, init waits for the service
    _log_to(state_folder(options.state_dir).log if options.detach else None)
    try:
        asyncio.run(_serve(options, settings))
    except LocalServiceTrouble as trouble:
        return _complain(str(trouble), trouble.exit_code)
    return 0


def _log_to(path: Path | None) -> None:
    """Log to stderr, or to a bounded file: who started us does not read."""
    handler: logging.Handler = logging.StreamHandler()
    if path is not None:
        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[handler]
    )


def _complain(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gateway.local.service")
    parser.add_argument("--state-dir", default=None)
    parser.add_argument("--preset", default="fast", choices=PRESETS)
    parser.add_argument("--set", action="append", default=[], dest="switches", metavar="NAME=VALUE")
    parser.add_argument("--idle-exit-s", type=float, default=None)
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument("--detach", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace, settings: ServiceSettings) -> None:
    service = Service(state_folder(options.state_dir), settings, default_parts())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    async with service.serving(options.port) as info:
        log.info("serving on %s (preset %s)", info.endpoint_url, settings.preset)
        if options.ready_fd is not None:
            os.write(options.ready_fd, b"ready")
            os.close(options.ready_fd)
        await service.until_stopped(options.idle_exit_s)
        log.info("ending")


if __name__ == "__main__":
    sys.exit(main())
