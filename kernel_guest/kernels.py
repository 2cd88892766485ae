"""What a kernel is to the processes of a machine: the request, its connection, how to start it.

Pure but for reading the file system: nothing here starts a process. The agent's side
(`kernel_host`) makes a `SpawnRequest`; the machine (`machine`) turns it into a `Launch`, which says
one of these:

    FORK      fork of this preimported process, then `launcher.run`
    SPARE     the same, but forked and half started before (`spare`)
    COLD      a fresh interpreter running `kernel_guest.launcher`
    COMMAND   another kernelspec's command line, as any Jupyter server would start it

Fork or cold. A fork is only the same as a fresh interpreter while what an interpreter reads at its
start is unchanged. It is not when the installed distributions changed since the template was made
(the new version must be seen after a restart), or when the kernel's environment sets a variable
that Python or a loaded library reads once at start. Then the kernel is cold, and says why.

Where. Sockets are `ipc` in the machine's `run` folder: no port to clash, nothing another user can
reach, and ipykernel has nothing to warn about. A number that is never used again makes the path of
each kernel, so that a client of the old kernel can never reach the new one.
"""

from __future__ import annotations

import enum
import json
import os
import re
import string
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_guest.shared.errors import SharedError

LOG_NAME = "kernel.log"
"""In the machine's folder: what kernels write to their original stdout and stderr."""

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")

# sockaddr_un.sun_path holds 108 bytes on Linux and 104 on macOS, the final zero included.
_SOCKET_PATH_BYTES = 103

# A message between agent and machine; an environment of this size would not start a process.
MAX_MESSAGE_BYTES = 1024 * 1024

# Names of kernelspecs that mean the Python kernel of this very environment.
_OWN_NAMES = frozenset({"", "python3", "python"})

# Variables that match the patterns below and do not change a running interpreter.
_HARMLESS = frozenset(
    {
        "PYTHONUNBUFFERED",  # a kernel's stdout is not a file; children inherit the variable
        "PYTHONSTARTUP",  # read by IPython when the kernel starts
        "PYTHONBREAKPOINT",  # read on each breakpoint()
        "PYTHONDONTWRITEBYTECODE",  # applied by the launcher
        "PYTHONEXECUTABLE",
        "PYDEVD_DISABLE_FILE_VALIDATION",  # about frozen modules, which are off
    }
)
_READ_ONCE = re.compile(r"PYTHON|PYDEVD_|DEBUGPY_|LD_|DYLD_|MALLOC_|GLIBC_TUNABLES")
# Read when a numerical library is loaded, which the template may have done.
_READ_ONCE_BY_NUMPY = re.compile(r"OMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|KMP_|VECLIB_|NUMEXPR_|NPY_")
_READ_ONCE_BY_MATPLOTLIB = re.compile(r"MPLCONFIGDIR|MATPLOTLIBRC")

# Never in a kernel's environment: they belong to the process that starts it.
_INTERNAL = re.compile(r"JPY_PARENT_PID|JPY_INTERRUPT_EVENT|KERNEL_GUEST_.*|PYTHONEXECUTABLE")


class SpawnFailed(SharedError):  # noqa: N818 - named like its tree: what happened
    """A kernel could not be started.

    `code` is one of bad_request, no_such_folder, path_too_long, unknown_kernel, bad_kernelspec,
    not_startable.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """The form that crosses the socket to the agent."""
        return {"code": self.code, "message": str(self)}


class UnknownKernel(SpawnFailed):
    """No kernelspec of that name in this environment; `available` lists those that exist."""

    def __init__(self, kernel_name: str, available: Iterable[str]) -> None:
        self.kernel_name = kernel_name
        self.available = tuple(sorted(available))
        listing = ", ".join(self.available) or "none"
        message = f"No kernel named {kernel_name!r} here. Available: {listing}."
        super().__init__("unknown_kernel", message)

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "kernel_name": self.kernel_name,
            "available": list(self.available),
        }


def spawn_failure(data: Mapping[str, Any]) -> SpawnFailed:
    """The error that `SpawnFailed.to_json` described."""
    if data["code"] == "unknown_kernel":
        return UnknownKernel(data["kernel_name"], data["available"])
    return SpawnFailed(data["code"], data["message"])


@dataclass(frozen=True, slots=True)
class Connection:
    """Where one kernel listens: `ipc` sockets `<ip>-1` to `<ip>-5`, in the order of CHANNELS."""

    ip: str
    transport: str = "ipc"

    def port(self, channel: str) -> int:
        """The number that stands for `channel` in a connection file."""
        return CHANNELS.index(channel) + 1

    def path(self, channel: str) -> str:
        """The socket file of `channel`."""
        return f"{self.ip}-{self.port(channel)}"

    def url(self, channel: str) -> str:
        """What a ZeroMQ socket connects to."""
        return f"{self.transport}://{self.path(channel)}"

    def ports(self) -> dict[str, int]:
        """`shell_port` and so on."""
        return {f"{channel}_port": self.port(channel) for channel in CHANNELS}


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """What the agent asks for. `kernel_name` None is the Python kernel of this environment."""

    key: str = field(repr=False)
    cwd: str
    signature_scheme: str = "hmac-sha256"
    kernel_name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_arguments: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The form that crosses the socket to the machine."""
        return {
            "key": self.key,
            "cwd": self.cwd,
            "signature_scheme": self.signature_scheme,
            "kernel_name": self.kernel_name,
            "env": dict(self.env),
            "extra_arguments": list(self.extra_arguments),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpawnRequest:
        """The inverse; raises SpawnFailed `bad_request` when a member is missing or mistyped."""
        try:
            request = cls(
                key=data["key"],
                cwd=data["cwd"],
                signature_scheme=data["signature_scheme"],
                kernel_name=data["kernel_name"],
                env=dict(data["env"]),
                extra_arguments=tuple(data["extra_arguments"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SpawnFailed("bad_request", f"Malformed spawn request: {error!r}.") from error
        request.check()
        return request

    def check(self) -> None:
        """Raise SpawnFailed for what no process could be started with."""
        words = [self.key, self.cwd, self.signature_scheme, *self.extra_arguments]
        words += [*self.env.keys(), *self.env.values()]
        if not all(isinstance(word, str) and "\0" not in word for word in words):
            raise SpawnFailed("bad_request", "Text without zero bytes expected in a spawn request.")
        if any(not name or "=" in name for name in self.env):
            raise SpawnFailed(
                "bad_request", "An environment variable's name is empty or holds '='."
            )
        if not os.path.isdir(self.cwd):
            raise SpawnFailed("no_such_folder", f"The working folder {self.cwd!r} does not exist.")


class Kind(enum.StrEnum):
    """How a kernel process comes to be."""

    FORK = "fork"
    SPARE = "spare"
    COLD = "cold"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Launch:
    """A decided start: everything the child needs, nothing left to look up."""

    kind: Kind
    number: int
    connection: Connection
    request: SpawnRequest
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    folder: Path
    interrupt_mode: str = "signal"
    language: str = "python"
    reason: str = ""

    @property
    def connection_file(self) -> str:
        """In the machine's run folder, private to its user."""
        return str(connection_file(self.folder, self.number))

    def spawned(self, pid: int) -> dict[str, Any]:
        """What the agent is told when the process exists."""
        return {
            "pid": pid,
            "kind": self.kind,
            "cold": self.kind not in (Kind.FORK, Kind.SPARE),
            "reason": self.reason,
            "ip": self.connection.ip,
            "number": self.number,
            "interrupt_mode": self.interrupt_mode,
            "language": self.language,
        }

    def connection_info(self) -> dict[str, Any]:
        """The content of the connection file."""
        return {
            **self.connection.ports(),
            "transport": self.connection.transport,
            "ip": self.connection.ip,
            "key": self.request.key,
            "signature_scheme": self.request.signature_scheme,
            "kernel_name": self.request.kernel_name or "",
        }

    def write_connection_file(self) -> None:
        """Private from its first byte on. Raises SpawnFailed `not_startable`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(self.connection_file, flags, 0o600), "w") as file:
                json.dump(self.connection_info(), file)
        except OSError as error:
            raise SpawnFailed("not_startable", f"No connection file: {error}.") from error

    def remove_files(self) -> None:
        """What a killed kernel leaves in the run folder."""
        remove_files(self.folder, self.number)


def remove_files(folder: Path, number: int) -> None:
    """Remove sockets and connection file of kernel `number` from the run folder."""
    connection = connection_of(folder, number)
    for channel in CHANNELS:
        Path(connection.path(channel)).unlink(missing_ok=True)
    connection_file(folder, number).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a fork inherits and cannot change: taken when the template was made."""

    folder_ages: tuple[tuple[str, int], ...]
    installed: frozenset[tuple[str, str, int]] = field(repr=False)
    environ: Mapping[str, str] = field(repr=False)
    forks: bool = True

    @classmethod
    def take(cls, *, forks: bool) -> TemplateFacts:
        """Of this process, now."""
        return cls(_folder_ages(), installed_distributions(), dict(os.environ), forks)

    def reason_for_cold(self, env: Mapping[str, str]) -> str:
        """Why a kernel with `env` must not be a fork; empty if it may."""
        if not self.forks:
            return "this platform does not fork kernels"
        name = self._changed_variable(env)
        if name:
            return f"{name} is read when an interpreter starts"
        return "installed distributions changed" if self._installed_changed() else ""

    def _installed_changed(self) -> bool:
        if _folder_ages() == self.folder_ages:
            return False
        return installed_distributions() != self.installed

    def _changed_variable(self, env: Mapping[str, str]) -> str:
        patterns = _read_once_patterns()
        for name in sorted(env.keys() | self.environ.keys()):
            if name in _HARMLESS or env.get(name) == self.environ.get(name):
                continue
            if any(pattern.match(name) for pattern in patterns):
                return name
        return ""


def _read_once_patterns() -> list[re.Pattern[str]]:
    patterns = [_READ_ONCE]
    if "numpy" in sys.modules:
        patterns.append(_READ_ONCE_BY_NUMPY)
    if "matplotlib" in sys.modules:
        patterns.append(_READ_ONCE_BY_MATPLOTLIB)
    return patterns


def installed_distributions() -> frozenset[tuple[str, str, int]]:
    """Folder, name and age of every installed distribution on sys.path, and of path files.

    An installer replaces the metadata folder even when the version stays the same, so name and
    modification time together see every change.
    """
    found: set[tuple[str, str, int]] = set()
    for folder in _package_folders():
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")):
                    age = entry.stat(follow_symlinks=False).st_mtime_ns
                    found.add((folder, entry.name, age))
    return frozenset(found)


def _package_folders() -> list[str]:
    kinds = ("site-packages", "dist-packages")
    return [folder for folder in dict.fromkeys(sys.path) if folder.endswith(kinds)]


def _folder_ages() -> tuple[tuple[str, int], ...]:
    """Adding or removing a distribution changes its folder: one look instead of hundreds."""
    ages = []
    for folder in _package_folders():
        with suppress(FileNotFoundError):
            ages.append((folder, os.stat(folder).st_mtime_ns))
    return tuple(ages)


def kernel_environment(base: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """The machine's environment with `changes`, without what is the guest's own."""
    env = {**base, **changes}
    return {name: value for name, value in env.items() if not _INTERNAL.fullmatch(name)}


def plan(number: int, request: SpawnRequest, folder: Path, facts: TemplateFacts) -> Launch:
    """Decide how kernel `number` of the machine in `folder` is started.

    Raises UnknownKernel for a kernelspec that is not there, SpawnFailed for one that cannot
    be used. Called by the machine for each spawn request.
    """
    connection = connection_of(folder, number)
    if len(os.fsencode(connection.path("hb"))) > _SOCKET_PATH_BYTES:
        raise SpawnFailed("path_too_long", f"The folder {folder} is too long for a socket path.")
    env = kernel_environment(os.environ, request.env)
    if (request.kernel_name or "") in _OWN_NAMES:
        reason = facts.reason_for_cold(env)
        kind = Kind.COLD if reason else Kind.FORK
        file = str(connection_file(folder, number))
        argv = (*_cold_command(), "-f", file, *request.extra_arguments)
        return Launch(kind, number, connection, request, argv, env, folder, reason=reason)
    return _plan_command(number, connection, request, env, folder)


def connection_of(folder: Path, number: int) -> Connection:
    """Where kernel `number` of the machine in `folder` listens."""
    return Connection(str(folder / "run" / f"k{number}"))


def connection_file(folder: Path, number: int) -> Path:
    """Where the connection file of kernel `number` of the machine in `folder` lies."""
    return folder / "run" / f"kernel-{number}.json"


def _cold_command() -> tuple[str, ...]:
    return (sys.executable, "-Xfrozen_modules=off", "-m", "kernel_guest.launcher")


def _plan_command(
    number: int,
    connection: Connection,
    request: SpawnRequest,
    env: dict[str, str],
    folder: Path,
) -> Launch:
    spec = find_kernelspec(request.kernel_name or "")
    if not all(isinstance(word, str) for word in (*spec.argv, *spec.env.values())):
        raise SpawnFailed("bad_kernelspec", f"Kernelspec {request.kernel_name!r} is not text.")
    # What the client has expanded already stands in the request; twice would be once too often.
    own = {name: value for name, value in spec.env.items() if name not in request.env}
    env |= {name: string.Template(value).safe_substitute(env) for name, value in own.items()}
    file = str(connection_file(folder, number))
    argv = format_command([*spec.argv, *request.extra_arguments], file, spec.resource_dir)
    return Launch(
        Kind.COMMAND,
        number,
        connection,
        request,
        tuple(argv),
        env,
        folder,
        interrupt_mode=spec.interrupt_mode,
        language=spec.language,
        reason="started from its kernelspec",
    )


def find_kernelspec(kernel_name: str) -> Any:
    """The kernelspec of that name in this environment; raises UnknownKernel.

    A kernelspec that names a provisioner runs somewhere else (ours does, in the same
    environment), so it counts as not there. An absolute path is a kernelspec's folder itself: a
    client that shares our file system may know kernelspecs that our search path does not hold.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    if os.path.isabs(kernel_name):
        named = _read_spec(kernel_name)
        if named is None or not _runs_here(named):
            raise UnknownKernel(kernel_name, ())
        return named
    folders = KernelSpecManager().find_kernel_specs()
    specs: dict[str, Any] = {}
    for name, resource_dir in folders.items():
        spec = _read_spec(resource_dir)
        if spec is not None and _runs_here(spec):
            specs[name] = spec
    if kernel_name.lower() not in specs:
        raise UnknownKernel(kernel_name, specs)
    return specs[kernel_name.lower()]


def _read_spec(resource_dir: str) -> Any:
    from jupyter_client.kernelspec import KernelSpec
    from traitlets import TraitError

    try:
        return KernelSpec.from_resource_dir(resource_dir)
    except (OSError, ValueError, TypeError, TraitError):
        return None  # a broken kernel.json is a kernel that is not available


def _runs_here(spec: Any) -> bool:
    stanza = spec.metadata.get("kernel_provisioner")
    if not isinstance(stanza, dict):
        return bool(spec.argv)
    return bool(spec.argv) and stanza.get("provisioner_name") in (None, "local-provisioner")


def format_command(argv: list[str], connection_file: str, resource_dir: str) -> list[str]:
    """Fill a kernelspec's command line the way jupyter_client does."""
    own = {"python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info[:2])}
    if argv[0] in own:
        argv = [sys.executable, *argv[1:]]
    values = {
        "connection_file": connection_file,
        "resource_dir": resource_dir,
        "prefix": sys.prefix,
    }
    pattern = re.compile(r"\{([A-Za-z0-9_]+)\}")
    return [pattern.sub(lambda m: values.get(m[1], m[0]), word) for word in argv]
