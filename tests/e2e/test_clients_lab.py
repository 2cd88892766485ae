"""A plain `jupyter lab` with the `microvm` kernelspec: its REST interface and its WebSockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.e2e.sandbox import Sandbox, sandbox
from tests.support.waiting import wait_until

TOKEN = "test-token"
START_LIMIT_S = 60


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        yield made


class Lab:
    """A running server and its REST interface."""

    def __init__(self, box: Sandbox, process: subprocess.Popen[bytes], url: str) -> None:
        self.box = box
        self.process = process
        self.url = url
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"token {TOKEN}"}, timeout=60
        )

    def ask(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    @contextmanager
    def channels(self, kernel_id: str) -> Iterator[Channels]:
        address = f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel_id}/channels"
        session = uuid.uuid4().hex
        with connect(
            f"{address}?session_id={session}&token={TOKEN}", max_size=None, open_timeout=60
        ) as socket:
            yield Channels(socket, session)


class Channels:
    """One browser's WebSocket, in the legacy protocol (JSON text frames)."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self.socket = socket
        self.session = session

    def send(self, channel: str, msg_type: str, content: dict[str, Any]) -> str:
        header = {
            "msg_id": uuid.uuid4().hex, "msg_type": msg_type, "session": self.session,
            "username": "t", "version": "5.3", "date": "",
        }  # fmt: skip
        message = {"header": header, "parent_header": {}, "metadata": {}, "buffers": []}
        self.socket.send(json.dumps(message | {"content": content, "channel": channel}))
        return str(header["msg_id"])

    def until(self, msg_id: str, kind: str) -> list[dict[str, Any]]:
        """Messages that answer ``msg_id``, up to the first of this kind."""
        seen: list[dict[str, Any]] = []
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message["parent_header"].get("msg_id") == msg_id:
                seen.append(message)
                if message["msg_type"] == kind:
                    return seen

    def run(self, code: str) -> tuple[str, str]:
        """(text of stdout, status of the reply), both complete."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        msg_id = self.send("shell", "execute_request", content | {"user_expressions": {}})
        texts, status, idle = [], "", False
        while not (status and idle):
            message = json.loads(self.socket.recv(timeout=60))
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])
            status = message["content"]["status"] if message["channel"] == "shell" else status
            idle = idle or message["content"].get("execution_state") == "idle"
        return "".join(texts), status


@contextmanager
def running_lab(box: Sandbox) -> Iterator[Lab]:
    options = ["--no-browser", "--port=0", f"--IdentityProvider.token={TOKEN}", "--ip=127.0.0.1"]
    if os.getuid() == 0:
        options.append("--allow-root")
    with (box.folder / "lab.log").open("wb") as log:
        process = box.popen("jupyter", "lab", *options, stdout=log, stderr=log)
    try:
        found = wait_until(
            lambda: (
                list((box.folder / "runtime").glob(f"jpserver-{process.pid}.json"))
                or process.poll()
            ),
            within_s=START_LIMIT_S,
            what="a running jupyter lab",
        )
        assert isinstance(found, list), (box.folder / "lab.log").read_text()
        lab = Lab(box, process, json.loads(found[0].read_text())["url"])
        with lab.http:
            yield lab
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_lab_runs_restarts_interrupts_and_ends_a_kernel(box: Sandbox) -> None:
    with running_lab(box) as lab:
        specs = lab.ask("GET", "api/kernelspecs")["kernelspecs"]
        assert {"microvm", "python3"} <= set(specs)
        kernel = lab.ask("POST", "api/kernels", json={"name": "microvm"})
        local = lab.ask("POST", "api/kernels", json={"name": "python3"})
        with lab.channels(kernel["id"]) as channels, lab.channels(local["id"]) as beside:
            assert channels.run("x = 6 * 7; print(x)") == ("42\n", "ok")
            assert beside.run("print('local')") == ("local\n", "ok")
            lab.ask("POST", f"api/kernels/{kernel['id']}/restart")
            assert channels.run("print('x' in globals())") == ("False\n", "ok")
            content = {"code": "print('begun', flush=True)\nwhile True: pass", "silent": False}
            msg_id = channels.send("shell", "execute_request", content)
            channels.until(msg_id, "stream")
            lab.ask("POST", f"api/kernels/{kernel['id']}/interrupt")
            reply = channels.until(msg_id, "execute_reply")[-1]
            assert reply["content"]["ename"] == "KeyboardInterrupt"
            assert channels.run("print('on')") == ("on\n", "ok")
        lab.ask("DELETE", f"api/kernels/{kernel['id']}")
        box.assert_all_terminated(at_least=1)


def test_a_notebooks_session_finds_its_neighbours_and_input_works(box: Sandbox) -> None:
    (box.folder / "work").mkdir()
    (box.folder / "work/neighbour.txt").write_text("found")
    with running_lab(box) as lab:
        wanted = {
            "path": "work/a.ipynb", "name": "a.ipynb", "type": "notebook",
            "kernel": {"name": "microvm"},
        }  # fmt: skip
        session = lab.ask("POST", "api/sessions", json=wanted)
        with lab.channels(session["kernel"]["id"]) as channels:
            assert channels.run("print(open('neighbour.txt').read())") == ("found\n", "ok")
            code = "import os; print(os.environ['JPY_SESSION_NAME'])"
            assert channels.run(code)[0].strip().endswith("work/a.ipynb")
            content = {"code": "print(input('? '))", "silent": False, "allow_stdin": True}
            msg_id = channels.send("shell", "execute_request", content)
            channels.until(msg_id, "input_request")
            channels.send("stdin", "input_reply", {"value": "typed"})
            assert channels.until(msg_id, "stream")[-1]["content"]["text"] == "typed\n"


def test_a_kernel_that_dies_is_restarted_and_the_socket_goes_on(box: Sandbox) -> None:
    with running_lab(box) as lab:
        kernel = lab.ask("POST", "api/kernels", json={"name": "microvm"})
        with lab.channels(kernel["id"]) as channels:
            assert channels.run("x = 1") == ("", "ok")
            code = {"code": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}
            channels.send("shell", "execute_request", code | {"silent": False})
            states = []
            while "restarting" not in states:
                message = json.loads(channels.socket.recv(timeout=60))
                states.append(message["content"].get("execution_state"))
            assert channels.run("print('x' in globals())") == ("False\n", "ok")


def test_a_server_that_ends_ends_its_machines(box: Sandbox) -> None:
    before = len(box.machine_states())
    with running_lab(box) as lab:
        kernel = lab.ask("POST", "api/kernels", json={"name": "microvm"})
        with lab.channels(kernel["id"]) as channels:
            assert channels.run("print(1)") == ("1\n", "ok")
        assert "RUNNING" in box.machine_states().values()
    box.assert_all_terminated(at_least=before + 1)


# -- two projects, two environments -----------------------------------------------


def make_environment(folder: Path, marker: str) -> Path:
    """A small virtual environment that sees ours, plus one package that only it has."""
    import site
    import venv

    venv.create(folder, with_pip=False)
    library = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    root = Path(__file__).resolve().parents[2]
    paths = [*site.getsitepackages(), str(root)]
    (library / "shared.pth").write_text("\n".join(paths) + "\n")
    (library / "project_marker.py").write_text(f"NAME = {marker!r}\n")
    return folder / "bin/python"


def test_two_projects_see_their_own_packages(box: Sandbox) -> None:
    code = """if True:
        import jupyter_client
        with jupyter_client.run_kernel(kernel_name="microvm") as kc:
            kc.execute_interactive("import project_marker as p, sys; print(p.NAME, sys.prefix)")
    """
    for name in ("one", "two"):
        python = make_environment(box.folder / name, f"project {name}")
        done = subprocess.run(
            [str(python), "-W", "ignore", "-c", code], cwd=box.folder, env=dict(box.environment),
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.stdout.split() == ["project", name, str(box.folder / name)], done.stderr
    box.assert_all_terminated(at_least=2)
