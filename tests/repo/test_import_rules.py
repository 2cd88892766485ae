"""The floors of the house: arrows point downwards only, pure rooms do no input or output."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Rooms that hold decisions only: fed with events and the time, they move no bytes.
PURE = [
    "kernel_guest/shared",
    "kernel_guest/journal.py",
    "kernel_guest/requests.py",
    "gateway/errors.py",
    "gateway/events.py",
    "gateway/lifecycle.py",
    "gateway/tokens.py",
    "gateway/activity.py",
    "gateway/messages.py",
    "gateway/profiles.py",
    "gateway/session/requests.py",
    "gateway/session/smalltalk.py",
    "gateway/session/status.py",
    "gateway/local/faults/plan.py",
    "gateway/local/lifecycle.py",
]
IO_LIBRARIES = {"asyncio", "tornado", "zmq", "boto3", "botocore", "httpx", "websockets", "socket"}

#: The only importers of the local service: the commands, and the embedded default.
MAY_IMPORT_LOCAL = ("gateway/cli/", "gateway/embedded.py", "gateway/local/")


def modules_under(*places: str) -> Iterator[Path]:
    for place in places:
        path = ROOT / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def imports_of(path: Path) -> set[str]:
    """Every module name that the file imports, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(absolute_names(path, node))
    return names


def absolute_names(path: Path, node: ast.ImportFrom) -> set[str]:
    module = node.module or ""
    if node.level:
        package = list(path.relative_to(ROOT).parts[:-1])
        base = package[: len(package) - node.level + 1]
        module = ".".join([*base, module] if module else base)
    return {module, *(f"{module}.{alias.name}" for alias in node.names)}


def imports_any(names: set[str], *packages: str) -> set[str]:
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in packages)}


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_do_no_input_or_output(room: str) -> None:
    paths = list(modules_under(room))
    assert paths, f"{room} is empty"
    for path in paths:
        assert not imports_any(imports_of(path), *IO_LIBRARIES), path


def test_the_shared_room_needs_the_standard_library_only() -> None:
    import sys

    for path in modules_under("kernel_guest/shared"):
        outside = {
            name
            for name in imports_of(path)
            if name.split(".")[0] not in sys.stdlib_module_names | {"kernel_guest"}
        }
        assert not outside, (path, outside)
        inside = imports_any(imports_of(path), "kernel_guest")
        assert all(n == "kernel_guest" or n.startswith("kernel_guest.shared") for n in inside), path


def test_the_guest_never_imports_the_gateway() -> None:
    for path in modules_under("kernel_guest"):
        assert not imports_any(imports_of(path), "gateway"), path


def test_the_gateway_imports_only_the_shared_room_of_the_guest() -> None:
    for path in modules_under("gateway"):
        guest = imports_any(imports_of(path), "kernel_guest")
        other = {
            n for n in guest if not n.startswith("kernel_guest.shared") and n != "kernel_guest"
        }
        assert not other, (path, other)


def test_only_the_commands_and_the_embedded_default_import_the_local_service() -> None:
    for path in modules_under("gateway"):
        where = path.relative_to(ROOT).as_posix()
        if not where.startswith(MAY_IMPORT_LOCAL):
            assert not imports_any(imports_of(path), "gateway.local"), where
