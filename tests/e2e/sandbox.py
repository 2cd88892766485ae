"""A private Jupyter installation and local service for end-to-end tests.

    with sandbox() as box:
        box.run("jupyter", "execute", "--kernel_name=microvm", "a.ipynb")

Everything lies in one short folder under /tmp (socket paths have 108 bytes), the service is this
sandbox's own, and when the `with` ends no machine runs, no process and no folder is left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil

from gateway.cli.kernelspec import install_kernelspec
from gateway.local import client
from tests.support.waiting import wait_until

BIN = Path(sys.executable).parent
#: Two cores are shared by whole test runs: a command that takes 2 s alone may take many times that.
COMMAND_LIMIT_S = 100


@dataclass(frozen=True)
class Sandbox:
    """Folder and environment; ``switches`` are those of the local service."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def state_dir(self) -> Path:
        return self.folder / "local"

    def run(
        self, *command: str, cwd: Path | None = None, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this Python environment, as a user would, in the sandbox."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=cwd or self.folder, env=dict(self.environment), capture_output=True, text=True,
            check=False, timeout=COMMAND_LIMIT_S, **options,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program in the sandbox; the caller ends it."""
        program = [str(BIN / command[0]), *command[1:]]
        return subprocess.Popen(
            program,
            cwd=self.folder,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            **options,
        )

    def notebook(self, *cells: str, name: str = "test.ipynb") -> Path:
        """Write a notebook of code cells."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells]
        )
        path = self.folder / name
        nbformat.write(notebook, path)
        return path

    # -- what the service says ----------------------------------------------------

    def aws(self, *arguments: str) -> Any:
        """The unmodified AWS CLI against the sandbox's service; its JSON answer."""
        info = client.read_info(self.state_dir)
        assert info is not None, "the local service does not run"
        environment = {**self.environment, **info.environment(), "AWS_PAGER": ""}
        done = subprocess.run(
            [str(BIN / "aws"), "lambda-microvms", *arguments, "--output", "json"],
            env=environment, capture_output=True, text=True, check=False, timeout=COMMAND_LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "{}")

    def machine_states(self) -> dict[str, str]:
        """Machine id → state, as the AWS CLI lists them."""
        listed = self.aws("list-microvms")
        (items,) = [value for value in listed.values() if isinstance(value, list)] or [[]]
        return {item["microvmId"]: item["state"] for item in items}

    def machine_processes(self) -> list[psutil.Process]:
        """Processes of machines: those below the service that work in a machine's folder."""
        machines = str(self.state_dir / "machines")
        return [process for process in self.processes() if machines in _traces(process)]

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to the sandbox, the service's family included."""
        found = {
            process for process in psutil.process_iter() if str(self.folder) in _traces(process)
        }
        info = client.read_info(self.state_dir)
        if info is not None and psutil.pid_exists(info.pid):
            found.update(psutil.Process(info.pid).children(recursive=True))
        return sorted(found - {psutil.Process()}, key=lambda process: process.pid)

    def assert_all_terminated(self, at_least: int = 1) -> None:
        """At least so many machines existed, and each is terminated, its processes gone."""
        states = self.machine_states()
        assert len(states) >= at_least
        assert set(states.values()) == {"TERMINATED"}, states
        wait_until(
            lambda: not self.machine_processes(), within_s=10, what="no process of a machine left"
        )


def _traces(process: psutil.Process) -> str:
    """Where a process shows where it belongs: arguments, folder, starting environment."""
    try:
        places = [*process.cmdline(), process.cwd()]
        places.append(process.environ().get(client.DIR_VARIABLE, ""))
        return "\n".join(places)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


@contextmanager
def sandbox(switches: Sequence[str] = ()) -> Iterator[Sandbox]:
    """Make one, start its service, and take it down without a trace."""
    folder = Path(tempfile.mkdtemp(prefix="mv-", dir="/tmp"))
    box = Sandbox(folder, _environment(folder))
    try:
        install_kernelspec(prefix=str(folder / "prefix"))
        client.ensure_running(box.state_dir, switches=switches)
        yield box
    finally:
        client.stop(box.state_dir)
        wait_until(lambda: not box.processes(), within_s=10, what="no process left")
        shutil.rmtree(folder)


def _environment(folder: Path) -> dict[str, str]:
    """What a user's shell has, as far as tests need it; nothing of the caller's Jupyter or AWS."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    kept["PATH"] = f"{BIN}:{kept.get('PATH', '/usr/bin:/bin')}"
    return kept | {
        "HOME": str(folder / "home"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PATH": str(folder / "prefix/share/jupyter"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        client.DIR_VARIABLE: str(folder / "local"),
    }


@contextmanager
def entered(box: Sandbox) -> Iterator[None]:
    """Make this very process a user of the sandbox, for tests that call the libraries directly."""
    names = [name for name in os.environ if name.startswith(("JUPYTER", "AWS_", "IPYTHON"))]
    before = {name: os.environ.pop(name) for name in names}
    added = {k: v for k, v in box.environment.items() if k.startswith(("JUPYTER", "IPYTHON"))}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        os.environ.update(before)
