"""What the heads of requests and responses say, and how they are passed on.  Moves no bytes.

Facts: LM 4.2 (the platform's headers), 4.3 (refusals), 5.1 (WebSocket subprotocols).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import h11

from gateway.local.behaviours import implements
from gateway.local.interfaces import AGENT_PORT, TokenVerdict

PLATFORM_PREFIX = b"x-aws-proxy-"
AUTH_HEADER = b"x-aws-proxy-auth"
PORT_HEADER = b"x-aws-proxy-port"
REQUEST_ID_HEADER = b"x-amzn-requestid"
PROTOCOL_HEADER = b"sec-websocket-protocol"

MARKER = "lambda-microvms"
AUTH_ITEM = "lambda-microvms.authentication."
PORT_ITEM = "lambda-microvms.port."

#: Hop-by-hop by definition (RFC 9110, 7.6.1); `Connection` may name more.
HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
#: Never dropped because `Connection` names them: that would change the message itself.
ALWAYS_KEPT = frozenset({b"host", b"content-length", PROTOCOL_HEADER})

Headers = list[tuple[bytes, bytes]]


class RawHeaders(Protocol):
    """h11's own header list: lower-case names by iteration, names as sent by `raw_items`."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]: ...

    def raw_items(self) -> list[tuple[bytes, bytes]]: ...


_PORT = re.compile(r"[0-9]{1,5}\Z")


class RefusedError(Exception):
    """The proxy answers this itself; `status` and `body` are what the client gets.

    With `close` the connection ends after it: what follows cannot be told apart.
    """

    def __init__(self, status: int, body: bytes = b"", *, close: bool = False) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.close = close


BAD_PORT = (400, b"Invalid x-aws-proxy-port")
PORT_DENIED = (TokenVerdict.PORT_DENIED.status, TokenVerdict.PORT_DENIED.body)
FOREIGN_HOST = (TokenVerdict.FAILED.status, TokenVerdict.FAILED.body)


@dataclass(frozen=True, slots=True)
class Access:
    """What a request brings for the platform.

    `ports` are the port texts of the first source that names one (header before
    subprotocol); `protocols` are the WebSocket subprotocols left for the application.
    """

    token: str | None
    ports: tuple[str, ...]
    marker_offered: bool
    protocols: tuple[str, ...]

    @implements("port-header-subprotocol-8080", "malformed-port-400")
    def port(self) -> int:
        """The target port.  Raises RefusedError (400)."""
        if not self.ports:
            return AGENT_PORT
        wanted = {text.strip() for text in self.ports}
        text = wanted.pop()
        if wanted or not _PORT.match(text) or not 1 <= int(text) <= 65535:
            raise RefusedError(*BAD_PORT)
        return int(text)


@implements("token-from-header-or-subprotocol")
def read_access(request: h11.Request) -> Access:
    """Read the platform's headers and, of an upgrade, its subprotocol items.

    Several different tokens in one request count as none: which one would be meant?
    """
    offered = _protocols(request) if is_upgrade(request) else []
    marker = MARKER in offered
    tokens = _values(request, AUTH_HEADER)
    ports = _values(request, PORT_HEADER)
    if marker and not tokens:
        tokens = [item.removeprefix(AUTH_ITEM) for item in offered if item.startswith(AUTH_ITEM)]
    if not ports:
        ports = [item.removeprefix(PORT_ITEM) for item in offered if item.startswith(PORT_ITEM)]
    return Access(
        token=tokens[0] if len(set(tokens)) == 1 else None,
        ports=tuple(ports),
        marker_offered=marker,
        protocols=tuple(item for item in offered if not _is_platform_item(item)),
    )


def _is_platform_item(item: str) -> bool:
    return item == MARKER or item.startswith((AUTH_ITEM, PORT_ITEM))


def _values(request: h11.Request, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in request.headers if key == name]


def _protocols(request: h11.Request) -> list[str]:
    items = ",".join(_values(request, PROTOCOL_HEADER)).split(",")
    return [item.strip() for item in items if item.strip()]


def is_upgrade(request: h11.Request) -> bool:
    """Whether this asks for a WebSocket; no other upgrade passes (LM 4.1)."""
    return (
        request.method == b"GET"
        and "websocket" in [text.strip().lower() for text in _values(request, b"upgrade")]
        and b"upgrade" in _named_by_connection(request.headers)
    )


@implements("smuggling-refused")
def check_framing(request: h11.Request) -> None:
    """Refuse what two readers could read differently (RFC 9112, 6.1 and 11.2).

    h11 has already refused differing Content-Lengths, unknown transfer codings, line
    folding tricks and control characters.  Raises RefusedError (400).
    """
    names = [name for name, _ in request.headers]
    coded = b"transfer-encoding" in names
    if coded and (b"content-length" in names or request.http_version < b"1.1"):
        raise RefusedError(400, b"Ambiguous message length", close=True)
    if not request.target.startswith(b"/") and request.target != b"*":
        raise RefusedError(400, b"Invalid request target", close=True)


@implements("foreign-host-403")
def check_host(request: h11.Request, port: int) -> None:
    """Only the machine's own endpoint may be addressed; a name that somebody points at
    127.0.0.1 (DNS rebinding) is foreign.  Raises RefusedError (403)."""
    hosts = [value.lower() for value in _values(request, b"host")]
    if hosts not in ([f"127.0.0.1:{port}"], [f"localhost:{port}"]):
        raise RefusedError(*FOREIGN_HOST)


@implements("platform-headers-stripped", "subprotocols-stripped")
def forwarded_request(request: h11.Request, access: Access) -> h11.Request:
    """The request as the guest sees it: nothing of the platform, nothing hop-by-hop.

    One exchange is one connection to the guest, hence `Connection: close`.
    """
    upgrade = is_upgrade(request)
    dropped = {PROTOCOL_HEADER} if upgrade else set[bytes]()
    headers = [
        (raw, value)
        for raw, name, value in _end_to_end(request.headers)
        if not name.startswith(PLATFORM_PREFIX) and name not in dropped
    ]
    if upgrade:
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        if access.protocols:
            headers.append((b"Sec-WebSocket-Protocol", ", ".join(access.protocols).encode()))
    else:
        headers.append((b"Connection", b"close"))
        headers += [
            (raw, value) for raw, name, value in _named(request.headers, b"transfer-encoding")
        ]
    return h11.Request(method=request.method, target=request.target, headers=headers)


@implements("requestid-header")
def forwarded_response(response: h11.Response, request_id: str) -> h11.Response:
    """A guest's response as the client sees it; h11 chooses the framing anew.

    Transfer-Encoding wins over Content-Length where a guest sends both.
    """
    coded = any(name == b"transfer-encoding" for name, _ in response.headers)
    headers = [
        (raw, value)
        for raw, name, value in _end_to_end(response.headers)
        if name != REQUEST_ID_HEADER and not (coded and name == b"content-length")
    ]
    headers.append((b"x-amzn-RequestId", request_id.encode()))
    return h11.Response(status_code=response.status_code, headers=headers, reason=response.reason)


@implements("marker-answered-for-guest")
def forwarded_switch(
    response: h11.InformationalResponse, access: Access, request_id: str
) -> h11.InformationalResponse:
    """The 101: the guest's choice of subprotocol, or the marker on its behalf (LM 5.1)."""
    headers: Headers = [
        (raw, value)
        for raw, name, value in _raw(response.headers)
        if name not in (REQUEST_ID_HEADER, PROTOCOL_HEADER)
    ]
    chosen = [value for _, name, value in _raw(response.headers) if name == PROTOCOL_HEADER]
    if not chosen and access.marker_offered:
        chosen = [MARKER.encode()]
    headers += [(b"Sec-WebSocket-Protocol", value) for value in chosen]
    headers.append((b"x-amzn-RequestId", request_id.encode()))
    return h11.InformationalResponse(status_code=101, headers=headers, reason=response.reason)


@implements("refusal-headers")
def refusal(error: RefusedError, request_id: str, *, close: bool) -> h11.Response:
    """A plain-text answer of the proxy itself (LM 4.2, 4.3)."""
    headers: Headers = [
        (b"Cache-Control", b"private, no-store"),
        (b"Content-Length", str(len(error.body)).encode()),
        (b"x-amzn-RequestId", request_id.encode()),
    ]
    if error.body:
        headers.append((b"Content-Type", b"text/plain; charset=utf-8"))
    if close:
        headers.append((b"Connection", b"close"))
    return h11.Response(status_code=error.status, headers=headers)


def _raw(headers: RawHeaders) -> Iterable[tuple[bytes, bytes, bytes]]:
    """(name as sent, lower-case name, value)."""
    for (raw, value), (name, _) in zip(headers.raw_items(), headers, strict=True):
        yield raw, name, value


def _named(headers: RawHeaders, wanted: bytes) -> list[tuple[bytes, bytes, bytes]]:
    return [item for item in _raw(headers) if item[1] == wanted]


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    """Lower-case names in all Connection headers."""
    named: set[bytes] = set()
    for _, _, value in _named(headers, b"connection"):
        named.update(item.strip().lower() for item in value.split(b","))
    return named


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes, bytes]]:
    dropped = HOP_BY_HOP | (_named_by_connection(headers) - ALWAYS_KEPT)
    return [item for item in _raw(headers) if item[1] not in dropped]
