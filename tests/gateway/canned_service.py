"""An HTTP server that gives the answers a test has recorded, for the client's error mapping.

Not a second emulator: it knows no operation. Each request takes the next answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gateway.profiles import ServiceAccess


@dataclass
class Answer:
    """Status, error type header, body (a dict is sent as JSON), further headers."""

    status: int = 200
    error: str | None = None
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class CannedService:
    """``requests`` is what came in: (method, path, body)."""

    def __init__(self, url: str) -> None:
        self.access = ServiceAccess("us-east-1", url, "AKIATEST", "test-secret")
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str, Any]] = []

    def will(self, *answers: Answer) -> None:
        self.answers += answers

    def next(self, method: str, path: str, body: bytes) -> Answer:
        self.requests.append((method, path, json.loads(body) if body else None))
        return self.answers.pop(0) if self.answers else Answer(500, "InternalServerException")


@contextmanager
def canned_service() -> Iterator[CannedService]:
    holder: list[CannedService] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            made = holder[0].next(self.command, self.path, body)
            data = (
                made.body.encode() if isinstance(made.body, str) else json.dumps(made.body).encode()
            )
            self.send_response(made.status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in made.headers.items():
                self.send_header(name, value)
            if made.error:
                self.send_header("x-amzn-ErrorType", made.error)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_PUT = answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    host, port = server.server_address[:2]
    holder.append(CannedService(f"http://{host!s}:{port}"))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield holder[0]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
