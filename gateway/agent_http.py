"""Plain requests to the guest's agent: one wakes a machine, one keeps it awake.

An upgrade is not replayed by the proxy when a machine resumes (LM 5.1), a plain
request is held until the machine answers (LM 4.3): so waking is a GET. And
requests are the only traffic that certainly counts as activity (LM 5.2).

httpx is imported at the first use, which is never a kernel's first start: the
import costs 30 ms and its TLS context as much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.bridge import Bridge
from gateway.errors import GuestFault, Unreachable
from gateway.link_socket import ProxyAnswer, is_loopback, tls_context

if TYPE_CHECKING:
    import httpx

__all__ = ["AgentHttp", "Health"]

# A resume holds the request: 0.7 to 2.6 s seen (LM 12), a heavy image more.
WAKE_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
# The health answer is below 1 KB; a guest that sends more is not believed.
MAX_HEALTH_BYTES = 64 * 1024
MAX_TEXT_CHARS = 128


class Health(NamedTuple):
    """What the guest says of itself."""

    boot_id: str
    kernel: str
    generation: int


class AgentHttp:
    """One machine's plain requests, over one kept connection. On the bridge's loop."""

    def __init__(self, home: Bridge, url: str) -> None:
        self._home = home
        self._url = url
        self._client: httpx.AsyncClient | None = None

    def prepare(self) -> None:
        """A wake will come: import httpx on a worker now rather than in the wake."""
        self._home.submit(_import_httpx)

    async def health(self, headers: Mapping[str, str]) -> Health:
        """Raises ProxyAnswer, Unreachable, GuestFault."""
        return _health(await self._get("/health", headers))

    async def keep_awake(self, headers: Mapping[str, str]) -> None:
        """Raises as ``health`` does."""
        await self._get("/keepawake", headers)

    async def close(self) -> None:
        """Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _get(self, path: str, headers: Mapping[str, str]) -> bytes:
        import httpx

        client = await self._connected()
        body = bytearray()
        try:
            async with client.stream("GET", self._url + path, headers=dict(headers)) as answer:
                async for piece in answer.aiter_raw():
                    body += piece
                    if len(body) > MAX_HEALTH_BYTES:
                        raise GuestFault(f"{path} answers with more than {MAX_HEALTH_BYTES} bytes")
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
            raise Unreachable(f"the machine at {self._url}", problem) from error
        if not answer.is_success:
            text = body[:MAX_TEXT_CHARS].decode("utf-8", errors="replace")
            raise ProxyAnswer(answer.status_code, text)
        return bytes(body)

    async def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            secure = self._url.startswith("https")
            verify = await self._home.work(tls_context) if secure else False
            self._client = _client(verify, trust_env=not is_loopback(self._url))
        return self._client


def _import_httpx() -> None:
    """And what httpx itself imports only when it connects."""
    import anyio._backends._asyncio  # noqa: F401
    import httpx  # noqa: F401


def _client(verify: Any, *, trust_env: bool) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(
        verify=verify,
        trust_env=trust_env,
        follow_redirects=False,
        timeout=httpx.Timeout(WAKE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=5),
    )


def _health(body: bytes) -> Health:
    try:
        facts = json.loads(body)
        boot_id, kernel = facts["boot_id"], facts["kernel"]
        generation = facts["generation"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GuestFault("its health answer is not what it should be") from error
    if not (isinstance(boot_id, str) and isinstance(kernel, str)):
        raise GuestFault("its health answer has wrong types")
    return Health(
        boot_id[:MAX_TEXT_CHARS],
        kernel[:MAX_TEXT_CHARS],
        generation if isinstance(generation, int) else 0,
    )
