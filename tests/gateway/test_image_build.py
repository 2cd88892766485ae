"""The zip of an image: its bytes, and whether what is in it installs and says the truth."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from gateway.errors import UsageError
from gateway.image_build import (
    GUEST_REQUIREMENTS,
    build_guest_wheel,
    build_image_zip,
    guest_version,
    image_folder,
)

ROOT = Path(__file__).resolve().parents[2]


def _archive(data: bytes) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(data))


def test_the_zip_has_the_dockerfile_at_its_root() -> None:
    names = _archive(build_image_zip(image_folder())).namelist()
    wheel = f"microvm_kernel_guest-{guest_version()}-py3-none-any.whl"
    assert names == ["Dockerfile", wheel, "requirements.txt"]


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    first = build_image_zip(image_folder())
    for name in ("Dockerfile", "requirements.txt"):
        copy = tmp_path / name
        copy.write_bytes((image_folder() / name).read_bytes())
        copy.chmod(0o600)
    assert build_image_zip(tmp_path) == first
    for entry in _archive(first).infolist():
        assert entry.date_time == (1980, 1, 1, 0, 0, 0)
        assert entry.external_attr >> 16 == 0o100644


def test_further_requirements_are_added(tmp_path: Path) -> None:
    extra = tmp_path / "mine.txt"
    extra.write_text("pandas==3.1.1")
    text = _archive(build_image_zip(image_folder(), [extra])).read("requirements.txt").decode()
    assert text.endswith("\npandas==3.1.1\n")
    assert "ipykernel==" in text


def test_missing_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot read .*Dockerfile|requirements"):
        build_image_zip(tmp_path)
    with pytest.raises(UsageError, match=r"Cannot read .*absent"):
        build_image_zip(image_folder(), [tmp_path / "absent"])


def test_the_wheel_records_every_file() -> None:
    name, data = build_guest_wheel()
    archive = _archive(data)
    info = name.rsplit("-", 3)[0].replace("microvm_kernel_guest", "microvm_kernel_guest")
    (record_name,) = [entry for entry in archive.namelist() if entry.endswith("RECORD")]
    assert record_name == f"microvm_kernel_guest-{guest_version()}.dist-info/RECORD", info
    rows = list(csv.reader(io.StringIO(archive.read(record_name).decode())))
    assert sorted(row[0] for row in rows) == sorted(archive.namelist())
    for path, digest, size in rows:
        if path != record_name:
            content = archive.read(path)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            assert (digest, size) == (f"sha256={wanted.decode()}", str(len(content)))


def test_the_wheel_holds_the_installed_guest() -> None:
    _, data = build_guest_wheel()
    archive = _archive(data)
    packed = {name for name in archive.namelist() if name.endswith(".py")}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernel_guest").rglob("*.py")}
    assert packed == here
    assert "kernel_guest/py.typed" in archive.namelist()


def test_pip_installs_the_wheel(tmp_path: Path) -> None:
    name, data = build_guest_wheel()
    (tmp_path / name).write_bytes(data)
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-index", "--target", str(target), str(tmp_path / name)],
        check=True,
    )  # fmt: skip
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import kernel_guest.shared.paths as m;"
        "from importlib.metadata import version; print(m.__file__, version('microvm-kernel-guest'))"
    )
    shown = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert shown.split() == [str(target / "kernel_guest/shared/paths.py"), guest_version()]


def _imported_distributions() -> set[str]:
    known = packages_distributions()
    found: set[str] = set()
    for path in (ROOT / "kernel_guest").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names):
                found.update(name.lower() for name in known.get(top, ()))
    return found - {"microvm-kernel-gateway"}


def test_the_wheel_requires_what_the_guest_imports() -> None:
    # What ipykernel brings along and cannot be without needs no line of its own.
    brought = {"ipython", "jupyter_client", "jupyter_core", "traitlets", "comm", "debugpy"}
    assert _imported_distributions() - brought <= set(GUEST_REQUIREMENTS)


def _pins(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_the_pins_are_those_that_were_tested() -> None:
    tested, image = _pins(ROOT / "constraints.txt"), _pins(ROOT / "image" / "requirements.txt")
    assert {name: tested.get(name) for name in image} == image
    assert {name.lower() for name in GUEST_REQUIREMENTS} <= set(image)


def test_the_dockerfile_is_what_the_guest_needs() -> None:
    text = (ROOT / "image" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "FROM public.ecr.aws/lambda/microvms:al2023-minimal"
    assert "EXPOSE 8080" in lines
    assert 'ENTRYPOINT ["python", "-m", "kernel_guest"]' in lines
    assert not [line for line in lines if line.startswith("EXPOSE") and "9000" in line]
