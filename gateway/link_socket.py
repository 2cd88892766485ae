"""Opening the WebSocket that a link runs over, and what its refusals mean.

Settings and their reasons:

* no WebSocket compression: deflate on 20 MB of a picture blocks a loop for
  0.4 s (techniques 14); the link has its own, negotiated, per message;
* ``max_size`` is one frame of the link: a guest cannot make us hold more;
* ping every 20 s: a quiet socket is cut at 60 s (LM 5.2); the answer may take
  as long again, so a dead peer is noticed after at most 40 s;
* no redirects: an answer of the guest's own server must not send our token
  to another place;
* a corporate proxy is used as the environment says, except towards this computer;
* one CA setting for this, boto3 and httpx: AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE.

Names are resolved on a worker, because asyncio's own resolution needs the
default executor, which is gone in ``atexit`` (JK 1.5). asyncio sets TCP_NODELAY.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.bridge import Bridge
from gateway.errors import RemoteFault, Unreachable
from kernel_guest.shared.frames import HEADER_BYTES
from kernel_guest.shared.limits import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["LINK_PATH", "ProxyAnswer", "ca_file", "is_loopback", "open_socket", "tls_context"]

LINK_PATH = "/link"
PING_EVERY_S = 20.0
PING_PATIENCE_S = 20.0
CLOSE_PATIENCE_S = 1.0
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + HEADER_BYTES
# Frames that wait for the pump before the socket is no longer read, and bytes
# that the kernel may hold for us before a send waits: a few frames each.
MAX_QUEUED_FRAMES = 16
WRITE_HIGH_BYTES = 512 * 1024
MAX_BODY_CHARS = 200


class ProxyAnswer(RemoteFault):
    """The upgrade or request was answered with another status than success (LM 4.3)."""

    def __init__(self, status: int, body: str, retry_after_s: float | None = None) -> None:
        shown = f": {body[:MAX_BODY_CHARS]}" if body else ""
        super().__init__(f"The machine's endpoint answered HTTP {status}{shown}")
        self.status = status
        self.retry_after_s = retry_after_s


def is_loopback(url: str) -> bool:
    """True for an address of this computer: no proxy, and compression does not pay."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ca_file() -> str | None:
    """The CA bundle that botocore would use, or None for the system's."""
    return os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")


@functools.lru_cache(maxsize=4)
def _tls_context_for(path: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=path)


def tls_context() -> ssl.SSLContext:
    """Made once per CA file: it costs 30 ms. Blocking: call it on a worker."""
    return _tls_context_for(ca_file())


async def open_socket(
    home: Bridge, url: str, headers: Mapping[str, str], timeout_s: float
) -> ClientConnection:
    """Connect and upgrade. Raises ProxyAnswer for a refusal, Unreachable for silence.

    ``timeout_s`` is real time: bytes on a socket move in real time whatever a test clock says.
    """
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    target = url.replace("http", "ws", 1) + LINK_PATH
    options: dict[str, Any] = {"proxy": None} if is_loopback(url) else {}
    if url.startswith("https"):
        options["ssl"] = await home.work(tls_context)
    options |= await _address(home, url)
    try:
        opened: ClientConnection = await _connector()(
            target,
            additional_headers=dict(headers),
            user_agent_header=None,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=MAX_QUEUED_FRAMES,
            write_limit=WRITE_HIGH_BYTES,
            ping_interval=PING_EVERY_S,
            ping_timeout=PING_PATIENCE_S,
            open_timeout=timeout_s,
            close_timeout=CLOSE_PATIENCE_S,
            **options,
        )
        return opened
    except InvalidStatus as error:
        raise _answer(error) from error
    except (InvalidHandshake, OSError, TimeoutError, EOFError) as error:
        raise Unreachable(f"the machine at {url}", _describe(error)) from error


@functools.cache
def _connector() -> type[Any]:
    """websockets' client without redirects; built late, because the import costs 12 ms."""
    from websockets.asyncio.client import connect

    class ConnectOnce(connect):
        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    return ConnectOnce


def _answer(error: Any) -> ProxyAnswer:
    response = error.response
    body = bytes(response.body or b"")[:MAX_BODY_CHARS].decode("utf-8", errors="replace")
    return ProxyAnswer(response.status_code, body, _seconds(response.headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _address(home: Bridge, url: str) -> dict[str, Any]:
    """``host`` and ``port`` with a numeric address, unless a proxy resolves the name itself."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if _numeric(host) or _proxied(url):
        return {}
    try:
        found = await home.work(
            functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        raise Unreachable(f"the machine at {url}", f"its name: {_describe(error)}") from error
    return {"host": found[0][4][0], "port": port}


def _numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _proxied(url: str) -> bool:
    if is_loopback(url):
        return False
    from websockets.proxy import get_proxy
    from websockets.uri import parse_uri

    return get_proxy(parse_uri(url.replace("http", "ws", 1))) is not None
