"""What a launch has to know of the client: its user, its folder, its kernelspec, its encryption.

Who calls: the provisioner, in the caller's own thread, before it hops over to the bridge.
"""

from __future__ import annotations

import os
import sys
from getpass import getuser
from typing import Any

import zmq
from jupyter_client.localinterfaces import is_local_ip, local_ips

from gateway.door_sockets import CurveKeys
from gateway.errors import UsageError

#: Where the door listens unless the manager says otherwise.
LOOPBACK = "127.0.0.1"

__all__ = ["client_folder", "curve_keys", "is_our_python", "user_name"]


def user_name() -> str:
    """The user on whose behalf this process works; profiles may be limited to some."""
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def client_folder(cwd: object) -> str:
    """The notebook's folder, absolute. Raises ``UsageError`` when there is none."""
    folder = os.path.abspath(str(cwd)) if cwd else os.getcwd()
    if not os.path.isdir(folder):
        raise UsageError(f"The folder {folder} for the kernel to work in does not exist.")
    return folder


def is_our_python(argv: list[str]) -> bool:
    """Whether a command line starts ipykernel in this very environment, as ``python3`` does."""
    own = {sys.executable, "python", "python3", "python{}.{}".format(*sys.version_info)}
    return argv[:1] != [] and argv[0] in own and argv[1:3] == ["-m", "ipykernel_launcher"]


def curve_keys(manager: Any, policy: str | None) -> CurveKeys | None:
    """The key pair when encryption is asked for and declared, made once per manager (JK 1.3).

    The same rules and sentences as jupyter_client's LocalProvisioner.
    """
    policy = manager._transport_encryption_policy(policy)
    if manager.transport == "tcp" and not manager.trait_has_value("ip"):
        # The default, without jupyter_client's search for it: it asks every interface of this
        # computer through psutil, whose import is 35 ms of a first start (2026-11-30).
        manager.ip = LOOPBACK
    if manager.transport == "tcp" and manager.ip != LOOPBACK and not is_local_ip(manager.ip):
        raise RuntimeError(
            f"Can only launch a kernel on a local interface. This one is not: {manager.ip}. "
            "Make sure that the '*_address' attributes are configured properly. "
            f"Currently valid addresses are: {local_ips()}"
        )
    if policy == "required" and manager.transport not in {"tcp", "ipc"}:
        raise RuntimeError(
            "transport_encryption='required' is only supported when transport is 'tcp' or 'ipc'."
        )
    declared = policy == "required" or manager._kernel_supports_curve_encryption()
    if policy == "disabled" or not declared:
        return None
    if manager.curve_publickey is None:
        manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()
    return CurveKeys(manager.curve_publickey, manager.curve_secretkey)
