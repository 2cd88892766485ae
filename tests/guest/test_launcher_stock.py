"""A forked kernel beside a stock one: the same code must see and show the same."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from kernel_guest.kernels import SpawnRequest
from tests.guest.machines import (
    DEADLINE_S,
    KEY,
    TemplateProcess,
    clean_environment,
    client_of,
    kernel_in,
    run_cell,
)

STATE = """
import __main__, asyncio, faulthandler, gc, json, locale, logging, os, resource, signal, site, sys
import threading, time, warnings
ip = get_ipython()
print(json.dumps({
    "argv": [sys.argv[0], sys.argv[1], len(sys.argv)],
    "orig_argv": [sys.orig_argv[0], len(sys.orig_argv)],
    "path": sys.path,
    "environ": dict(os.environ),
    "signals": {n: repr(signal.getsignal(n)) for n in signal.valid_signals() - {9, 19}},
    "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": sorted(type(t).__name__ + " " + t.name for t in threading.enumerate()),
    "main": sorted(name for name in vars(__main__) if name.startswith("__")),
    "main spec": [__name__, repr(__main__.__spec__), getattr(__main__, "__file__", None)],
    "flags": [repr(sys.flags), sys.dont_write_bytecode],
    "process session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "shell": [type(ip).__name__, sorted(ip.config), ip.profile_dir.location],
    "history": [ip.history_manager.enabled, str(ip.history_manager.hist_file)],
    "collector": [gc.isenabled(), gc.get_threshold()],
    "limits": [resource.getrlimit(getattr(resource, name))
               for name in dir(resource) if name.startswith("RLIMIT_")],
    "warnings": [repr(f) for f in warnings.filters],
    "encodings": [locale.getlocale(), sys.getfilesystemencoding(), sys.stdin.encoding,
                  sys.__stdout__.encoding, sys.__stdout__.errors, sys.__stdout__.line_buffering],
    "faulthandler": faulthandler.is_enabled(),
    "umask": os.umask(0o22),
    "logging": [logging.root.level, len(logging.root.handlers)],
    "hooks": [type(sys.displayhook).__name__, type(sys.stdout).__name__, sys.excepthook.__name__],
    "loop": type(asyncio.get_running_loop()).__name__,
    "sizes": [sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size()],
    "import": [repr(type(x)) for x in sys.meta_path] + [len(sys.path_hooks)],
    "builtins": sorted(dir(__builtins__)),
    "session": ip.kernel.session.username, "started in": ip.starting_dir,
    "hidden": sorted(ip.user_ns_hidden), "names": sorted(ip.user_ns),
    "terminal": ip.Completer.dumb_terminal, "notebook name": globals().get("__session__"),
    "place": [os.getcwd(), sys.executable, sorted(os.sched_getaffinity(0)), os.nice(0)],
    "zone": time.tzname,
}))
"""

# Code, and text that must appear although it may come late: other processes write it.
BEHAVIOUR = {
    "print and result": ("print('out'); 6 * 7", "out"),
    "stderr": ("import sys; print('err', file=sys.stderr)", "err"),
    "descriptor": ("import os; _ = os.write(1, 'fd ü\\n'.encode())", "fd ü\n"),
    "subprocess": ("import subprocess; _ = subprocess.run(['echo', 'child'])", "child\n"),
    "shell escape": ("!echo shell", "shell"),
    "captured": ("x = !echo captured\nx", ""),
    "await": ("import asyncio\nawait asyncio.sleep(0, 'awaited')", ""),
    "error": ("1 / 0", ""),
    "display": ("from IPython.display import HTML, display; display(HTML('<b>x</b>'))", ""),
    "magic": ("%timeit -n1 -r1 -q pass", ""),
    "fork": (
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print,"
        " args=('forked',)); p.start(); p.join(); p.exitcode",
        "forked",
    ),
    "spawn": (
        "p = m.get_context('spawn').Process(target=print, args=('spawned',));"
        " p.start(); p.join(); p.exitcode",
        "spawned",
    ),
    "pool": ("with m.get_context('fork').Pool(2) as pool: y = pool.map(abs, [-1, -2])\ny", ""),
    "thread": (
        "import threading; t = threading.Thread(target=print, args=('in thread',));"
        " t.start(); t.join()",
        "in thread",
    ),
    "plot": ("import matplotlib.pyplot as plt; _ = plt.plot([1, 2])", ""),
    "backend": ("import matplotlib; matplotlib.get_backend()", ""),
    "bang exit code": ("!exit 3\n_exit_code", ""),
    "exit hook": ("import atexit; atexit.register(print) is print", ""),
}


@asynccontextmanager
async def stock_kernel(folder: Path, env: dict[str, str]) -> AsyncIterator[AsyncKernelClient]:
    manager = AsyncKernelManager(transport="ipc", connection_file=str(folder / "stock.json"))
    await manager.start_kernel(env=env, cwd=str(folder))
    client = manager.client()
    client.start_channels(hb=False)
    try:
        await client.wait_for_ready(timeout=DEADLINE_S)
        yield client
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        client.context.destroy(linger=0)


async def transcript(client: AsyncKernelClient) -> dict[str, Any]:
    """Everything one kernel shows for STATE and BEHAVIOUR."""
    seen: dict[str, Any] = {"state": json.loads((await run_cell(client, STATE)).stdout)}
    for name, (code, text) in BEHAVIOUR.items():
        cell = await run_cell(client, code, text)
        outputs = [simplified(output) for output in merged(cell.outputs)]
        seen[name] = [cell.status, *(sorted(outputs) if text else outputs)]
    return seen


def merged(outputs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Streams are cut by time, which is not behaviour."""
    result: list[tuple[str, Any]] = []
    for kind, content in outputs:
        if kind == "stream" and result and result[-1][0] == kind + content["name"]:
            result[-1] = (result[-1][0], result[-1][1] + content["text"])
        else:
            result.append(
                (kind + content["name"], content["text"]) if kind == "stream" else (kind, content)
            )
    return result


def simplified(output: tuple[str, Any]) -> tuple[str, str]:
    kind, content = output
    if isinstance(content, dict) and "image/png" in content.get("data", {}):
        content = {**content, "data": sorted(content["data"])}
    return kind, re.sub(r"0x[0-9a-f]+", "0x", json.dumps(content, sort_keys=True))


@pytest.fixture(scope="module")
def transcripts(template: TemplateProcess) -> dict[str, dict[str, Any]]:
    """What both kernels showed, each run alone in the same folder with the same environment."""
    with tempfile.TemporaryDirectory(prefix="kg-") as name:
        folder = Path(name)
        machine_env = {"HOME": name, "IPYTHONDIR": str(folder / "ipython")}
        client_env = {"USER": "ada", "TERM": "dumb", "TZ": "XST-5", "JPY_SESSION_NAME": "a.ipynb"}
        env = {**clean_environment(), **machine_env, **client_env}

        async def both() -> dict[str, dict[str, Any]]:
            async with stock_kernel(folder, env) as client:
                stock = await transcript(client)
            with template.machine(folder, env=machine_env) as machine:
                async with kernel_in(machine, env=client_env) as (host, kernel, client):
                    seen = {"stock": stock, kernel.kind: await transcript(client)}
                    second = await host.spawn(SpawnRequest(key=KEY, cwd=name, env=client_env))
                    async with client_of(second) as client:
                        return {**seen, second.kind: await transcript(client)}

        return asyncio.run(both())


@pytest.mark.parametrize("kind", ["spare", "fork"])
@pytest.mark.parametrize("name", list(BEHAVIOUR))
def test_code_shows_the_same(transcripts: dict[str, dict[str, Any]], name: str, kind: str) -> None:
    assert transcripts[kind][name] == transcripts["stock"][name]


@pytest.mark.parametrize("kind", ["spare", "fork"])
def test_the_process_looks_the_same(transcripts: dict[str, dict[str, Any]], kind: str) -> None:
    stock, ours = deepcopy(transcripts["stock"]["state"]), transcripts[kind]["state"]
    # The difference that is meant: no parent to poll, so no thread that does.
    assert stock["environ"].pop("JPY_PARENT_PID")
    assert "ParentPollerUnix Thread-1" in stock["threads"]
    stock["threads"].remove("ParentPollerUnix Thread-1")
    assert ours == stock
