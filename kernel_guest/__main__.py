"""`python -m kernel_guest`: the guest's processes, all of them forks of this one.

    python -m kernel_guest                             the image's entry point: one machine, here
    python -m kernel_guest template --control-fd N     a template that forks machines on request

The first form binds the agent port and the hook port and becomes the machine's init in place, so
that a snapshot of the MicroVM holds everything preimported. The second is what the local service
starts once for each environment; see `template` for what it says over descriptor N.

The interpreter runs without frozen modules, like a stock kernel with a debugger: pydevd cannot
step through modules that have no file. Not started that way, it starts itself again.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from kernel_guest.machine import Role

# The folder and the ports of the image; the ports are also in gateway profiles (LM 3.4, 7.1).
_FOLDER = "/var/lib/kernel-guest"
_AGENT_ADDRESS = "0.0.0.0:8080"
_HOOK_ADDRESS = "0.0.0.0:9000"

# A burst of connections at wake-up must not be refused; the proxy admits few (LM 4.4).
_BACKLOG = 1024


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run until the end of whichever process this one becomes."""
    options = _parse(arguments)
    if sys._xoptions.get("frozen_modules") != "off":
        _start_again()
    _leave_working_folder_out()
    # Imported only now: the module search path is what a kernel's will be.
    from kernel_guest import template
    from kernel_guest.shared.errors import SharedError

    role: Role | None
    try:
        role = _first_role(options, template)
    except SharedError as error:
        sys.exit(f"kernel_guest: {error}")
    while role is not None:
        role = role()
    sys.exit(0)


def _first_role(options: argparse.Namespace, template: ModuleType) -> Role:
    role: Role
    if options.command == "template":
        role = template.serve(options.control_fd)
    else:
        listeners = [_listen(options.agent_address), _listen(options.hook_address)]
        role = template.become_machine(options.folder, *listeners)
    return role


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernel_guest", description=__doc__)
    folder = os.environ.get("KERNEL_GUEST_FOLDER", _FOLDER)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--agent-address", default=_AGENT_ADDRESS)
    parser.add_argument("--hook-address", default=_HOOK_ADDRESS)
    commands = parser.add_subparsers(dest="command")
    template = commands.add_parser("template", help="fork machines on request")
    template.add_argument("--control-fd", type=int, required=True)
    return parser.parse_args(arguments)


def _start_again() -> NoReturn:
    options = ["-Xfrozen_modules=off", *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, *options])  # noqa: S606 - ourselves


def _leave_working_folder_out() -> None:
    """`-m` put it first; a kernel gets its own working folder back, in IPython's place for it."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def _listen(address: str) -> socket.socket:
    """Bind `host:port`, or end with status 2 and one sentence."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        print(f"kernel_guest: cannot listen on {address}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
