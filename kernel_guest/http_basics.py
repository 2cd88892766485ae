"""What the agent's and the hooks' HTTP servers share: the error shape and the bounds.

Every answer that is not a success has the one body `{"error": {"code", "message"}}`, a
path that is not known included.  Nothing a caller sends reaches a message or a log but
in escaped and cut form.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.web import Application, HTTPError, RequestHandler

from kernel_guest.shared.errors import error_body

__all__ = ["JsonHandler", "NotFoundHandler", "make_server"]

log = logging.getLogger(__name__)

# A hook's body is a JSON string inside JSON: a payload of 4 KiB (LM 2.2) in which every
# byte is escaped as \u00XX, twice, and the machine's id.
MAX_BODY_BYTES = 64 * 1024
MAX_HEADER_BYTES = 32 * 1024  # a token has up to 868 bytes (LM 4.5); the proxy strips it
_BODY_TIMEOUT_S = 10.0
_IDLE_S = 120.0

_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    500: "internal",
    503: "unavailable",
}


class JsonHandler(RequestHandler):
    """Answers in JSON, errors included."""

    def set_default_headers(self) -> None:
        """Health and hooks tell the present; nobody may keep them."""
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")

    def compute_etag(self) -> None:
        """Not worth a hash."""

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        """Finish with a JSON body."""
        self.set_status(status)
        self.finish(body)

    def refuse(self, status: int, code: str, message: str) -> None:
        """Finish with the error shape."""
        self.set_status(status)
        self.finish(error_body(code, message))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """tornado's own refusals and crashes, in our shape."""
        code = _CODES.get(status_code, "error")
        error = kwargs.get("exc_info", (None, None, None))[1]
        known = isinstance(error, HTTPError) and error.log_message
        self.finish(error_body(code, str(error.log_message) if known else code.replace("_", " ")))


class NotFoundHandler(JsonHandler):
    """Every path that is not known."""

    def prepare(self) -> None:
        """Whatever the method."""
        self.refuse(404, "not_found", "There is nothing at this path.")


def log_request(handler: RequestHandler) -> None:
    """One debug line; requests are too frequent and too boring for more."""
    request: HTTPServerRequest = handler.request
    log.debug("%s %.80r %d", request.method, request.path, handler.get_status())


def make_server(application: Application, listener: socket.socket) -> HTTPServer:
    """Serve on an inherited listener, unix or TCP."""
    server = HTTPServer(
        application,
        max_body_size=MAX_BODY_BYTES,
        max_buffer_size=1024 * 1024,
        max_header_size=MAX_HEADER_BYTES,
        body_timeout=_BODY_TIMEOUT_S,
        idle_connection_timeout=_IDLE_S,
    )
    listener.setblocking(False)
    server.add_socket(listener)
    return server
