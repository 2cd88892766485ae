"""The control API's HTTP server: one listener on loopback, driven by the model.

Order of checks for a request: Host, signature, ordered faults, route, rate,
readable body, constraints, then the operation.  Nothing of an unsigned request
is parsed beyond its head and size.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine

from gateway.local.api import serialising
from gateway.local.api.context import Context
from gateway.local.api.errors import (
    ApiError,
    HtmlGatewayError,
    UnreadableRequestError,
    throttled,
)
from gateway.local.api.model import ApiModel, Operation
from gateway.local.api.operations import HANDLERS
from gateway.local.api.parsing import parse_input, read_document
from gateway.local.api.rates import RateLimiter
from gateway.local.api.signature import (
    SignatureChecker,
    SignatureRefusedError,
    SignedRequest,
)
from gateway.local.api.validation import validate
from gateway.local.behaviours import implements
from gateway.local.interfaces import FaultPoint

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20  # the largest request of the model has 100 variables of 4 KiB
IDLE_CONNECTION_S = 3600.0
_JSON = "application/json"

_HTML_502 = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n"
    b"<body>\r\n<center><h1>502 Bad Gateway</h1></center>\r\n</body>\r\n</html>\r\n"
)


#: An endpoint of the local service's own, beside the API: a JSON document in, one out.
Internal = Callable[[Context, Mapping[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back, whatever happened."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ApiServer:
    """Serves the control API on one port."""

    def __init__(
        self,
        context: Context,
        model: ApiModel,
        checker: SignatureChecker,
        limiter: RateLimiter | None,
        *,
        on_request: Callable[[], None],
        internal: Mapping[str, Internal],
        real_now_s: Callable[[], float] = time.time,
    ) -> None:
        """Signatures are checked against real time: clients sign with theirs."""
        self._context = context
        self._model = model
        self._checker = checker
        self._limiter = limiter
        self._on_request = on_request
        self._internal = internal
        self._real_now_s = real_now_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._hosts: frozenset[str] = frozenset()
        self._http = HTTPServer(
            self._accept,
            max_body_size=MAX_BODY_BYTES,
            idle_connection_timeout=IDLE_CONNECTION_S,
            no_keep_alive=False,
        )

    def listen(self, sockets: list[Any]) -> None:
        """Serve on bound loopback sockets."""
        port = sockets[0].getsockname()[1]
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        self._http.add_sockets(sockets)

    async def close(self) -> None:
        """Stop listening, close connections, wait for what is being answered."""
        self._http.stop()
        await self._http.close_all_connections()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, request: HTTPServerRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: HTTPServerRequest) -> None:
        self._on_request()
        answer = await self._answer(request)
        quiet = request.method == "GET" and answer.status < 400
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %d", request.method, request.path, answer.status,
        )  # fmt: skip
        headers = HTTPHeaders({"x-amzn-RequestId": str(uuid.uuid4()), **answer.headers})
        if answer.status != 204:
            headers["Content-Length"] = str(len(answer.body))
        connection = request.connection
        assert connection is not None  # only a request that a test made up has none
        start = ResponseStartLine("HTTP/1.1", answer.status, _phrase(answer.status))
        try:
            connection.write_headers(start, headers, answer.body)
            connection.finish()
        except OSError:  # tornado's StreamClosedError is one: the client has gone
            log.debug("the client did not wait for its answer")

    async def _answer(self, request: HTTPServerRequest) -> Answer:
        try:
            return await self._dispatch(request)
        except ApiError as error:
            return self._error(error)
        except SignatureRefusedError as refusal:
            headers, body = serialising.plain_error(refusal.code, refusal.message)
            return Answer(403, {"Content-Type": _JSON, **headers}, body)
        except UnreadableRequestError:
            return Answer(400, {"Content-Type": _JSON}, b'{"message": null}')
        except HtmlGatewayError:
            return Answer(502, {"Content-Type": "text/html"}, _HTML_502)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return self._error(ApiError("InternalServerException", None))

    async def _dispatch(self, request: HTTPServerRequest) -> Answer:
        self._check_caller(request)
        if (internal := self._internal.get(request.path)) is not None:
            values = await internal(self._context, read_document(request.body))
            return Answer(200, {"Content-Type": _JSON}, json.dumps(values).encode())
        self._strike_faults()
        match = self._model.match(request.method or "", request.path)
        if match is None:
            raise UnreadableRequestError
        self._check_rate(match.operation)
        members = parse_input(match, request.query, request.body)
        if (error := validate(match.operation.input_shape, members)) is not None:
            raise error
        values = await HANDLERS[match.operation.name](self._context, members)
        return _success(match.operation, values)

    @implements("host-checked")
    def _check_caller(self, request: HTTPServerRequest) -> None:
        """Host against DNS rebinding, then the signature over all of the request."""
        headers = request.headers
        if headers.get("Host") not in self._hosts:
            raise SignatureRefusedError("AccessDeniedException", None)
        signed = SignedRequest(
            request.method or "", request.uri or "", _lowered(headers), request.body
        )
        self._checker.check(signed, self._real_now_s())

    @implements("fault-html-502", "fault-throttled", "fault-credentials-expired")
    def _strike_faults(self) -> None:
        faults = self._context.faults
        if faults.take(FaultPoint.CREDENTIALS_EXPIRED):
            raise SignatureRefusedError(
                "ExpiredTokenException", "The security token included in the request is expired"
            )
        if faults.take(FaultPoint.API_HTML_502):
            raise HtmlGatewayError
        if faults.take(FaultPoint.API_THROTTLED):
            raise throttled(1.0)

    def _check_rate(self, operation: Operation) -> None:
        if self._limiter is None:
            return
        wait_s = self._limiter.take(operation.name, self._context.clock.monotonic_s())
        if wait_s > 0:
            raise throttled(wait_s)

    def _error(self, error: ApiError) -> Answer:
        shape = self._model.error_shape(error.code)
        status, headers, body = serialising.error_answer(shape, error.message, error.members)
        return Answer(status, {"Content-Type": _JSON, **headers}, body)


def _lowered(headers: HTTPHeaders) -> dict[str, str]:
    """Names in lower case; repeated headers are joined with a comma, as tornado does."""
    return {name.lower(): headers[name] for name in headers}


def _phrase(status: int) -> str:
    return http.HTTPStatus(status).phrase


def _success(operation: Operation, values: Mapping[str, Any]) -> Answer:
    if operation.status == 204:
        return Answer(204, {}, b"")
    body = serialising.output_body(operation.output_shape, values)
    return Answer(operation.status, {"Content-Type": _JSON}, body)
