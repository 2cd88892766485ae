"""The client of the MicroVM service: one per account, region and process.

Apart from ``control.py`` so that a process which makes one call only (``first_calls.py``) need not
import the rest of the gateway.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from gateway.profiles import ServiceAccess

if TYPE_CHECKING:
    from botocore.client import BaseClient

__all__ = ["SERVICE", "client_for"]

SERVICE = "lambda-microvms"
CONNECT_TIMEOUT_S = 5.0
# RunMicrovm answers within seconds (LM 12); a minute is "not any more".
READ_TIMEOUT_S = 60.0
TOTAL_ATTEMPTS = 4

_clients: dict[ServiceAccess, BaseClient] = {}
_clients_lock = threading.Lock()


def _forget_clients() -> None:
    """After a fork: a client's open connections are the parent's, and two processes that read
    from one connection get each other's answers. The lock may have been held by a thread that
    the child does not have.
    """
    global _clients_lock
    _clients.clear()
    _clients_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_clients)


def client_for(access: ServiceAccess) -> BaseClient:
    """One client per access and process: making one costs as much as ten calls."""
    with _clients_lock:
        if access not in _clients:
            _clients[access] = make_client(access)
        return _clients[access]


def make_client(access: ServiceAccess) -> BaseClient:
    from botocore.config import Config
    from botocore.session import Session

    from gateway.slim_botocore import SlimLoader

    session = Session(profile=access.aws_profile)
    if type(session.get_component("data_loader")).__name__ == "Loader":
        session.register_component("data_loader", SlimLoader.like(session))
    client: BaseClient = session.create_client(
        SERVICE,
        region_name=access.region,
        endpoint_url=access.endpoint_url,
        aws_access_key_id=access.access_key_id,
        aws_secret_access_key=access.secret_access_key,
        config=Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": TOTAL_ATTEMPTS},
            tcp_keepalive=True,
            user_agent_extra="microvm-kernel-gateway",
        ),
    )
    return client
