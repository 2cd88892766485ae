"""Kernelspecs that name our provisioner: written whole, listed, removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from gateway.cli.kernelspec import (
    InstallKernelspec,
    KernelspecApp,
    install_kernelspec,
    list_kernelspecs,
    remove_kernelspec,
)
from gateway.errors import UsageError


@pytest.fixture
def manager(tmp_path: Path) -> KernelSpecManager:
    return KernelSpecManager(
        kernel_dirs=[str(tmp_path / "share/jupyter/kernels")], ensure_native_kernel=False
    )


def test_the_kernelspec_names_the_provisioner_and_the_profile_only(tmp_path: Path) -> None:
    folder = install_kernelspec(prefix=str(tmp_path), profile="big")
    spec = json.loads((folder / "kernel.json").read_text())
    stanza = spec["metadata"]["kernel_provisioner"]
    assert stanza == {"provisioner_name": "microvm-provisioner", "config": {"profile": "big"}}
    assert spec["language"] == "python"
    assert spec["interrupt_mode"] == "signal"
    assert spec["metadata"]["debugger"] is True
    assert isinstance(spec["argv"], list)
    assert spec["display_name"] == "Python 3 (MicroVM, big)"


def test_jupyter_finds_it_with_its_logos(tmp_path: Path, manager: KernelSpecManager) -> None:
    install_kernelspec(prefix=str(tmp_path), display_name="Mine")
    assert manager.get_kernel_spec("microvm").display_name == "Mine"
    assert (tmp_path / "share/jupyter/kernels/microvm/logo-64x64.png").stat().st_size > 100
    assert [path.name for path in (tmp_path / "share/jupyter/kernels").iterdir()] == ["microvm"]


def test_an_existing_one_is_replaced_only_when_asked(tmp_path: Path) -> None:
    install_kernelspec(prefix=str(tmp_path), profile="a")
    with pytest.raises(UsageError, match="--replace"):
        install_kernelspec(prefix=str(tmp_path), profile="b")
    folder = install_kernelspec(prefix=str(tmp_path), profile="b", replace=True)
    assert '"profile": "b"' in (folder / "kernel.json").read_text()
    assert len(list(folder.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["", "a b", "../up", "..", "é"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a kernelspec name"):
        install_kernelspec(prefix=str(tmp_path), name=name)


def test_user_and_prefix_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one of"):
        install_kernelspec(prefix=str(tmp_path), user=True)


def test_the_users_folder_is_where_jupyter_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    assert install_kernelspec(user=True) == tmp_path / "kernels" / "microvm"


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("a file, not a folder")
    with pytest.raises(UsageError, match=r"^Cannot write .*try --user\.$"):
        install_kernelspec(prefix=str(tmp_path))


def test_only_ours_are_listed_and_removed(tmp_path: Path, manager: KernelSpecManager) -> None:
    install_kernelspec(prefix=str(tmp_path), name="one", profile="small")
    for name, spec in {"other": {"argv": [], "display_name": "x"}, "broken": None}.items():
        folder = tmp_path / "share/jupyter/kernels" / name
        folder.mkdir()
        (folder / "kernel.json").write_text(json.dumps(spec) if spec else "{")
    assert {n: f["profile"] for n, f in list_kernelspecs(manager).items()} == {"one": "small"}
    with pytest.raises(UsageError, match="installed: one"):
        remove_kernelspec("other", manager)
    remove_kernelspec("one", manager)
    assert not list_kernelspecs(manager)
    assert (tmp_path / "share/jupyter/kernels/other").is_dir()


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The commands as a user types them, without the user's own files."""
    code = "from gateway.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "kernelspec", *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "JUPYTER_DATA_DIR": str(home / "data")},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_commands_end_to_end(tmp_path: Path) -> None:
    install = run("install", "--user", "--name", "mine", "--profile=p", home=tmp_path)
    assert install.returncode == 0, install.stderr
    assert "Installed kernelspec mine" in install.stdout
    listed = json.loads(run("list", "--json", home=tmp_path).stdout)["kernelspecs"]
    assert listed["mine"]["profile"] == "p"
    again = run("install", "--user", "--name", "mine", home=tmp_path)
    assert again.returncode == 2
    assert again.stderr.strip().endswith("use --replace.")
    removed = run("remove", "mine", "-y", home=tmp_path)
    assert removed.returncode == 0, removed.stderr
    # This environment may have kernelspecs of its own: `make demo` installs one.
    assert "mine" not in json.loads(run("list", "--json", home=tmp_path).stdout)["kernelspecs"]
    assert run("remove", "mine", "-y", home=tmp_path).returncode == 2


def test_sys_prefix_is_this_environment() -> None:
    options: dict[str, Any] = InstallKernelspec.flags["sys-prefix"][0]
    assert options == {"InstallKernelspec": {"prefix": sys.prefix}}
    assert set(KernelspecApp.subcommands) == {"install", "list", "remove"}
