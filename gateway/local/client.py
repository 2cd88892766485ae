"""Finding, starting and stopping the local service, from any process of its user.

Standard library only on the warm path: `read_info` costs well under a
millisecond and is called at every start of an embedded kernel.

The state folder is the meeting point.  `service.lock` is flock'ed by the service
for as long as it lives, so a service that died is never taken for a live one,
whatever its pid has become.  `service.json` is written last, when everything
answers.  `start.lock` makes parallel callers start one service.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gateway.errors import LocalServiceTrouble, UsageError

DIR_VARIABLE = "JUPYTER_MICROVM_LOCAL_DIR"
DEFAULT_IDLE_EXIT_S = 1800.0
_POLL_S = 0.02
_KILL_WAIT_S = 3.0
_TAIL_BYTES = 8192
INTERNAL_LIMIT_S = 30.0

#: What the service may see of its starter's environment.  No credentials, no
#: PYTHON* variables of a project: the service is shared by all of them.
ALLOWED = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
        "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH",
        # building an image installs packages and may fetch from S3's stand-in
        "AWS_ENDPOINT_URL_S3", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
        "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
        "PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX",
        "PIP_FIND_LINKS", "PIP_CERT", "PIP_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    }
)  # fmt: skip
ALLOWED_PREFIXES = ("LC_",)


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What a client needs to call the service; the content of `service.json`."""

    endpoint_url: str
    region: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    pid: int
    started_at: float = 0.0
    preset: str = "fast"

    def environment(self) -> dict[str, str]:
        """The standard variables that make any AWS SDK or CLI use this service."""
        return {
            "AWS_ENDPOINT_URL_LAMBDA_MICROVMS": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The paths inside a state folder."""

    path: Path

    @property
    def info(self) -> Path:
        return self.path / "service.json"

    @property
    def lock(self) -> Path:
        return self.path / "service.lock"

    @property
    def start_lock(self) -> Path:
        return self.path / "start.lock"

    @property
    def log(self) -> Path:
        return self.path / "service.log"

    @property
    def database(self) -> Path:
        return self.path / "state.sqlite"

    def make(self) -> None:
        """Make the folder private and see that it can be written.

        Raises LocalServiceTrouble.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.getuid():
                raise LocalServiceTrouble(f"the state folder {self.path} belongs to another user.")
            self.path.chmod(0o700)
            os.close(os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise LocalServiceTrouble(
                f"the state folder {self.path} cannot be written ({error.strerror}); "
                f"choose another one with {DIR_VARIABLE} or --state-dir."
            ) from error


def state_folder(state_dir: str | os.PathLike[str] | None = None) -> StateFolder:
    """The folder given, else that of the environment, else Jupyter's runtime folder."""
    chosen = state_dir or os.environ.get(DIR_VARIABLE)
    if not chosen:
        from jupyter_core.paths import jupyter_runtime_dir

        chosen = os.path.join(jupyter_runtime_dir(), "microvm-local")
    return StateFolder(Path(os.path.abspath(chosen)))


def read_info(state_dir: str | os.PathLike[str] | None = None) -> ServiceInfo | None:
    """The live and ready service of this folder, or None."""
    folder = state_folder(state_dir)
    if not is_held(folder.lock):
        return None
    try:
        values = json.loads(folder.info.read_bytes())
        return ServiceInfo(**values)
    except (OSError, ValueError, TypeError):
        return None


def write_info(folder: StateFolder, info: ServiceInfo) -> None:
    """Publish the service, at once and only to this user.  Called by the service, last."""
    draft = folder.info.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as sink:
        json.dump(asdict(info), sink)
    draft.replace(folder.info)


def ensure_running(
    state_dir: str | os.PathLike[str] | None = None,
    *,
    preset: str = "fast",
    wait_s: float = 20.0,
    idle_exit_s: float | None = DEFAULT_IDLE_EXIT_S,
    switches: Sequence[str] = (),
    port: int | None = None,
) -> ServiceInfo:
    """The service of this folder, started if there is none.

    The other arguments count only for a service that this call starts; a running
    one is taken as it is.  Raises LocalServiceTrouble with one clear sentence.
    """
    if (info := read_info(state_dir)) is not None:
        return info
    folder = state_folder(state_dir)
    folder.make()
    deadline_s = time.monotonic() + wait_s
    with _start_turn(folder, deadline_s):
        if (info := _await_other(folder, deadline_s)) is not None:
            return info
        command = _command(folder, preset, idle_exit_s, switches, port)
        _start(folder, command, deadline_s)
        if (info := read_info(folder.path)) is None:
            raise LocalServiceTrouble(f"it ended right after its start: {log_tail(folder)}")
        return info


def stop(state_dir: str | os.PathLike[str] | None = None, wait_s: float = 15.0) -> bool:
    """End the service and all of its machines; False if there was none.

    A service that does not end within `wait_s` is killed; its machines die with it.
    """
    folder = state_folder(state_dir)
    info = read_info(state_dir)
    if info is None:
        # None, or one that is ending (or starting) at this moment.
        return is_held(folder.lock) and _await_free(folder, time.monotonic() + wait_s)
    for number, patience_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, _KILL_WAIT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.pid, number)
        if _await_free(folder, time.monotonic() + patience_s):
            return True
    raise LocalServiceTrouble(f"process {info.pid} did not end.")


def is_held(lock: Path) -> bool:
    """Whether a live process holds this lock file."""
    try:
        fd = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def log_tail(folder: StateFolder) -> str:
    """The last line that the service wrote: why it ended, usually."""
    try:
        with folder.log.open("rb") as log:
            log.seek(max(0, folder.log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "it left no log."
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty.")


@contextlib.contextmanager
def _start_turn(folder: StateFolder, deadline_s: float) -> Iterator[None]:
    """Hold `start.lock`, waiting for whoever starts a service now."""
    fd = os.open(folder.start_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _pause(deadline_s, "another process was still starting it")
        yield
    finally:
        os.close(fd)


def _await_other(folder: StateFolder, deadline_s: float) -> ServiceInfo | None:
    """A service that somebody else started, once it is ready; None if there is none."""
    while True:
        if (info := read_info(folder.path)) is not None:
            return info
        if not is_held(folder.lock):
            return None
        _pause(deadline_s, f"it was not ready: {log_tail(folder)}")


def _pause(deadline_s: float, problem: str) -> None:
    if time.monotonic() > deadline_s:
        raise LocalServiceTrouble(f"gave up waiting; {problem}")
    time.sleep(_POLL_S)


def _await_free(folder: StateFolder, deadline_s: float) -> bool:
    while is_held(folder.lock):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _command(
    folder: StateFolder,
    preset: str,
    idle_exit_s: float | None,
    switches: Sequence[str],
    port: int | None,
) -> list[str]:
    command = [sys.executable, "-P", "-m", "gateway.local.service"]
    command += ["--state-dir", str(folder.path), "--preset", preset]
    if idle_exit_s is not None:
        command += ["--idle-exit-s", str(idle_exit_s)]
    if port is not None:
        command += ["--port", str(port)]
    for switch in switches:
        command += ["--set", switch]
    return command


def _start(folder: StateFolder, command: list[str], deadline_s: float) -> None:
    """Start the service and wait until it says that it is ready, or why not."""
    ours, theirs = os.pipe()
    try:
        fd = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # The process that we start leaves the service to init and ends: nobody is
            # left with a zombie, and the service does not end with its starter.
            subprocess.run(
                [*command, "--detach", "--ready-fd", str(theirs)],
                cwd=folder.path, env=scrubbed(os.environ), stdin=subprocess.DEVNULL,
                stdout=fd, stderr=fd, start_new_session=True, pass_fds=(theirs,), check=False,
                timeout=max(1.0, deadline_s - time.monotonic()),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LocalServiceTrouble(f"it did not start in time: {log_tail(folder)}") from None
        finally:
            os.close(fd)
            os.close(theirs)
        _await_ready(folder, ours, deadline_s)
    finally:
        os.close(ours)


def _await_ready(folder: StateFolder, ready_fd: int, deadline_s: float) -> None:
    readable, _, _ = select.select([ready_fd], [], [], max(0.0, deadline_s - time.monotonic()))
    if not readable:
        raise LocalServiceTrouble(f"it was not ready in time: {log_tail(folder)}")
    if os.read(ready_fd, 16) != b"ready":
        raise LocalServiceTrouble(log_tail(folder).removeprefix("Local service: "))


def scrubbed(source: Mapping[str, str]) -> dict[str, str]:
    """The allowed part of an environment."""
    return {
        name: value
        for name, value in source.items()
        if name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    }


def call_internal(info: ServiceInfo, path: str, document: Mapping[str, object]) -> object:
    """POST a JSON document to an endpoint of the service's own; returns the answer's.

    Signed like every other call.  Raises LocalServiceTrouble if nobody answers,
    UsageError with the service's sentence if it refuses.
    """
    import urllib.error
    import urllib.request

    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    url = info.endpoint_url + path
    body = json.dumps(document).encode()
    signed = AWSRequest("POST", url, {"Content-Type": "application/json"}, body)
    keys = Credentials(info.access_key_id, info.secret_access_key)
    SigV4Auth(keys, "lambda", info.region).add_auth(signed)
    request = urllib.request.Request(url, body, dict(signed.headers.items()))  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=INTERNAL_LIMIT_S) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise UsageError(json.load(error).get("message") or f"HTTP {error.code}") from error
    except (OSError, ValueError) as error:
        raise LocalServiceTrouble(f"it does not answer: {error}") from error
