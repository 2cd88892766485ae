"""``jupyter microvm kernelspec install | list | remove``.

A kernelspec of ours names the provisioner and a profile, and nothing else: what the profile means
is in the trusted configuration (design 6.7). Its ``argv`` is a placeholder that cannot be run, on
purpose: an application that ignores ``kernel_provisioner`` must fail, not run the notebook here.
"""

# ruff: noqa: RUF012  # traitlets wants aliases, flags and subcommands as plain class attributes

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_core.application import base_aliases, base_flags
from jupyter_core.paths import SYSTEM_JUPYTER_PATH, jupyter_data_dir
from traitlets import Bool, List, Unicode

from gateway.cli.app import USAGE, MicroVMCommand
from gateway.errors import UsageError
from gateway.profiles import DEFAULT_PROFILE_NAME

__all__ = [
    "DEFAULT_KERNELSPEC_NAME",
    "PROVISIONER_NAME",
    "InstallKernelspec",
    "KernelspecApp",
    "ListKernelspecs",
    "RemoveKernelspec",
    "install_kernelspec",
    "kernel_json",
    "list_kernelspecs",
    "remove_kernelspec",
]

#: The entry point in the group ``jupyter_client.kernel_provisioners`` (pyproject.toml).
PROVISIONER_NAME: Final = "microvm-provisioner"
DEFAULT_KERNELSPEC_NAME: Final = "microvm"
_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")


# -- what the commands do -----------------------------------------------------


def kernel_json(profile: str, display_name: str) -> dict[str, Any]:
    """The content of ``kernel.json``."""
    return {
        "argv": [PROVISIONER_NAME, "{connection_file}"],
        "display_name": display_name,
        "language": "python",
        "interrupt_mode": "signal",
        "metadata": {
            # The bug icon appears only with it (JK 4).
            "debugger": True,
            # The door's sockets can be CurveZMQ servers (JK 1.3).
            "supported_encryption": ["curve"],
            "kernel_provisioner": {
                "provisioner_name": PROVISIONER_NAME,
                "config": {"profile": profile},
            },
        },
    }


def install_kernelspec(
    *,
    prefix: str | None = None,
    user: bool = False,
    name: str = DEFAULT_KERNELSPEC_NAME,
    profile: str = DEFAULT_PROFILE_NAME,
    display_name: str | None = None,
    replace: bool = False,
) -> Path:
    """Write the kernelspec and return its folder.

    ``prefix`` gives ``PREFIX/share/jupyter/kernels/NAME``, ``user`` the user's data folder, neither
    the system's. Raises ``UsageError`` with one sentence for a bad name, an existing kernelspec
    without ``replace``, and a place that cannot be written.
    """
    if user and prefix:
        raise UsageError("Choose one of --user, --sys-prefix and --prefix.")
    target = _kernels_folder(prefix, user) / _checked_name(name)
    if target.exists() and not replace:
        raise UsageError(f"A kernelspec is already at {target}; use --replace.")
    shown = display_name or _default_display_name(profile)
    try:
        _write_folder(target, kernel_json(profile, shown))
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {error.strerror}; try --user.") from error
    return target


def list_kernelspecs(manager: KernelSpecManager | None = None) -> dict[str, dict[str, str]]:
    """Installed kernelspecs that use our provisioner: name → folder, profile, display name."""
    found = (manager or KernelSpecManager()).find_kernel_specs()
    described = {name: _describe(Path(folder)) for name, folder in sorted(found.items())}
    return {name: facts for name, facts in described.items() if facts is not None}


def remove_kernelspec(name: str, manager: KernelSpecManager | None = None) -> Path:
    """Delete one of our kernelspecs; returns its folder. Raises ``UsageError``."""
    ours = list_kernelspecs(manager)
    if name not in ours:
        known = ", ".join(ours) or "none"
        raise UsageError(f"There is no MicroVM kernelspec named {name!r}; installed: {known}.")
    folder = Path(ours[name]["folder"])
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise UsageError(f"Cannot remove {folder}: {error.strerror}.") from error
    return folder


def _default_display_name(profile: str) -> str:
    suffix = "" if profile == DEFAULT_PROFILE_NAME else f", {profile}"
    return f"Python 3 (MicroVM{suffix})"


def _checked_name(name: str) -> str:
    lowered = name.lower()
    if not lowered or not set(lowered) <= _NAME_CHARACTERS or set(lowered) <= {"."}:
        raise UsageError(
            f"{name!r} is not a kernelspec name: use letters, digits, '.', '_' and '-'."
        )
    return lowered


def _kernels_folder(prefix: str | None, user: bool) -> Path:
    if user:
        return Path(jupyter_data_dir()) / "kernels"
    if prefix:
        return Path(prefix) / "share" / "jupyter" / "kernels"
    return Path(SYSTEM_JUPYTER_PATH[0]) / "kernels"


def _write_folder(target: Path, spec: dict[str, Any]) -> None:
    """Complete or not at all: a launcher may list kernelspecs at any moment."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".microvm-", dir=target.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir(mode=0o755)
        (fresh / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
        _copy_logos(fresh)
        if target.exists():
            os.replace(target, Path(scratch) / "old")
        os.replace(fresh, target)


def _copy_logos(folder: Path) -> None:
    """ipykernel's logos, because the kernel is one; without them a launcher shows a letter."""
    import ipykernel

    for logo in (Path(ipykernel.__file__).parent / "resources").glob("logo-*"):
        shutil.copyfile(logo, folder / logo.name)


def _describe(folder: Path) -> dict[str, str] | None:
    """Facts about the kernelspec in ``folder``; ``None`` when it is not ours or not readable."""
    try:
        spec = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
        stanza = spec["metadata"]["kernel_provisioner"]
        if stanza["provisioner_name"] != PROVISIONER_NAME:
            return None
        profile = str(stanza.get("config", {}).get("profile") or DEFAULT_PROFILE_NAME)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {
        "folder": str(folder),
        "profile": profile,
        "display_name": str(spec.get("display_name", "")),
    }


# -- the commands -------------------------------------------------------------


class _KernelspecCommand(MicroVMCommand):
    """What the three commands share. Errors are raised; ``run_guarded`` makes sentences of them."""

    def _manager(self) -> KernelSpecManager:
        return KernelSpecManager(parent=self, data_dir=self.data_dir)

    def start(self) -> None:
        """Called by traitlets after parsing."""
        super().start()
        self.act()

    def act(self) -> None:
        """The command itself; raises from the error tree."""
        raise NotImplementedError


class InstallKernelspec(_KernelspecCommand):
    """Install a kernelspec that starts its kernels in MicroVMs."""

    name = "jupyter-microvm-kernelspec-install"
    description = "Install a kernelspec that starts its kernels in MicroVMs."
    examples = """
    jupyter microvm kernelspec install --sys-prefix
    jupyter microvm kernelspec install --user --name big --profile big --display-name "Python (big)"
    """

    user = Bool(False, help="Install for the current user.").tag(config=True)
    prefix = Unicode("", help="Install under PREFIX/share/jupyter/kernels.").tag(config=True)
    kernel_name = Unicode(DEFAULT_KERNELSPEC_NAME, help="Name of the kernelspec.").tag(config=True)
    display_name = Unicode("", help="Name that launchers show.").tag(config=True)
    profile = Unicode(
        DEFAULT_PROFILE_NAME, help="The profile (jupyter_microvm_config.py) to start kernels with."
    ).tag(config=True)
    replace = Bool(False, help="Replace an existing kernelspec of this name.").tag(config=True)

    aliases = {
        **base_aliases,
        "name": "InstallKernelspec.kernel_name",
        "prefix": "InstallKernelspec.prefix",
        "display-name": "InstallKernelspec.display_name",
        "profile": "InstallKernelspec.profile",
    }
    flags = {
        **base_flags,
        "user": ({"InstallKernelspec": {"user": True}}, "Install for the current user."),
        "sys-prefix": (
            {"InstallKernelspec": {"prefix": sys.prefix}},
            "Install into this Python's environment.",
        ),
        "replace": (
            {"InstallKernelspec": {"replace": True}},
            "Replace an existing kernelspec of this name.",
        ),
    }

    def act(self) -> None:
        folder = install_kernelspec(
            prefix=self.prefix or None,
            user=self.user,
            name=self.kernel_name,
            profile=self.profile,
            display_name=self.display_name or None,
            replace=self.replace,
        )
        print(f"Installed kernelspec {folder.name} in {folder}")


class ListKernelspecs(_KernelspecCommand):
    """List the kernelspecs that start their kernels in MicroVMs."""

    name = "jupyter-microvm-kernelspec-list"
    description = "List the kernelspecs that start their kernels in MicroVMs."

    json_output = Bool(False, help="Print JSON.").tag(config=True)
    flags = {
        **base_flags,
        "json": ({"ListKernelspecs": {"json_output": True}}, "Print JSON."),
    }

    def act(self) -> None:
        ours = list_kernelspecs(self._manager())
        if self.json_output:
            print(json.dumps({"kernelspecs": ours}, indent=2))
        elif not ours:
            print("No MicroVM kernelspec is installed; see jupyter microvm kernelspec install.")
        for name, facts in ours.items() if not self.json_output else ():
            print(f"{name:<20} profile {facts['profile']:<16} {facts['folder']}")


class RemoveKernelspec(_KernelspecCommand):
    """Remove kernelspecs by name; only those of our provisioner."""

    name = "jupyter-microvm-kernelspec-remove"
    description = "Remove MicroVM kernelspecs by name."
    examples = "    jupyter microvm kernelspec remove microvm -y"

    names = List(Unicode())
    flags = {
        **base_flags,
        "y": ({"RemoveKernelspec": {"answer_yes": True}}, "Do not ask."),
    }

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """The positional arguments are names."""
        super().parse_command_line(argv)
        self.names = list(dict.fromkeys(self.extra_args))

    def act(self) -> None:
        if not self.names:
            raise UsageError("Say which kernelspec: jupyter microvm kernelspec remove NAME.")
        if not self.answer_yes and not _confirmed(self.names):
            return
        for name in self.names:
            print(f"Removed {remove_kernelspec(name, self._manager())}")


def _confirmed(names: list[str]) -> bool:
    answer = input(f"Remove {', '.join(names)} [y/N]: ")
    return answer.lower().startswith("y")


class KernelspecApp(MicroVMCommand):
    """``jupyter microvm kernelspec``: only dispatches."""

    name = "jupyter-microvm-kernelspec"
    description = "Manage kernelspecs that start their kernels in MicroVMs."
    examples = "    jupyter microvm kernelspec install --sys-prefix"
    subcommands = {
        "install": (InstallKernelspec, "Install a kernelspec"),
        "list": (ListKernelspecs, "List installed kernelspecs"),
        "remove": (RemoveKernelspec, "Remove kernelspecs"),
    }
    flags = base_flags
    aliases = base_aliases

    def start(self) -> None:
        super().start()
        if self.subapp is None:
            self.print_help()
            self.exit(USAGE)
