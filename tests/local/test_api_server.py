"""The HTTP side of the control API, seen by clients that are not boto3."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.local.clock import SystemClock
from gateway.local.faults.plan import parse_fault
from gateway.local.lifecycle import Phase
from tests.local.in_process import LIMIT_S, House, house, run


def port_of(home: House) -> int:
    return int(home.info.endpoint_url.rpartition(":")[2])


def sign(home: House, method: str, target: str, body: bytes, host: str) -> dict[str, str]:
    request = AWSRequest(method, f"http://{host}{target}", {"Host": host}, body)
    credentials = Credentials(home.info.access_key_id, home.info.secret_access_key)
    SigV4Auth(credentials, "lambda", "us-east-1").add_auth(request)
    return dict(request.headers.items())


async def raw(
    home: House,
    method: str,
    target: str,
    body: bytes = b"",
    *,
    host: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """One request on a fresh connection; signed unless `headers` are given."""
    host = host or f"127.0.0.1:{port_of(home)}"
    sent = sign(home, method, target, body, host) if headers is None else {"Host": host, **headers}
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(home))
    connection = h11.Connection(h11.CLIENT)
    pieces = [
        connection.send(
            h11.Request(
                method=method,
                target=target,
                headers=[*sent.items(), ("Content-Length", str(len(body)))],
            )
        ),
        connection.send(h11.Data(data=body)) if body else b"",
        connection.send(h11.EndOfMessage()),
    ]
    writer.write(b"".join(piece or b"" for piece in pieces))
    try:
        async with asyncio.timeout(LIMIT_S):
            return await answer(connection, reader)
    finally:
        writer.close()


async def answer(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[int, dict[str, str], bytes]:
    status, headers, body = 0, {}, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {n.decode(): v.decode() for n, v in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            return status, headers, body


def test_bodies_spell_out_nulls_and_extra_members() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            body = json.dumps({"imageIdentifier": arn}).encode()
            status, headers, raw_body = await raw(home, "POST", "/2025-09-09/microvms", body)
            assert status == 200
            assert headers["content-type"] == "application/json"
            assert "x-amzn-requestid" in headers
            shown = json.loads(raw_body)
            nulls = {name for name, value in shown.items() if value is None}
            assert nulls == {
                "executionRoleArn", "idlePolicy", "terminatedAt", "stateReason",
                "terminationReasonCode", "kmsKeyIdentifier",
            }  # fmt: skip
            assert isinstance(shown["startedAt"], float)
            target = f"/2025-09-09/microvm-images/{arn}"
            image = json.loads((await raw(home, "GET", target))[2])
            assert {"id", "buildPhaseOverrides", "roleConfiguration"} <= image.keys()
            version = json.loads((await raw(home, "GET", f"{target}/versions/1.0"))[2])
            assert "versionStateTimeBucket" in version

    run(scenario())


def test_errors_have_type_header_and_null_members() -> None:
    async def scenario() -> None:
        async with house() as home:
            status, headers, body = await raw(home, "GET", "/2025-09-09/microvms/microvm-1")
            assert (status, headers["x-amzn-errortype"]) == (404, "ResourceNotFoundException")
            assert json.loads(body) == {
                "message": "MicroVM not found: microvm-1", "resourceType": None, "resourceId": None,
            }  # fmt: skip

    run(scenario())


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/", b""),
        ("POST", "/2025-09-09/microvms", b"{"),
        ("GET", "/2025-09-09/microvms?nextToken", b""),
    ],
)
def test_what_cannot_be_parsed(method: str, target: str, body: bytes) -> None:
    async def scenario() -> None:
        async with house() as home:
            status, _, answered = await raw(home, method, target, body)
            assert (status, json.loads(answered)) == (400, {"message": None})

    run(scenario())


def test_an_unsigned_request_is_refused_before_it_is_looked_at() -> None:
    async def scenario() -> None:
        async with house() as home:
            status, headers, body = await raw(
                home, "POST", "/2025-09-09/microvms", b"{", headers={}
            )
            assert status == 403
            assert headers["x-amzn-errortype"] == "MissingAuthenticationTokenException"
            assert json.loads(body) == {"message": "Missing Authentication Token"}

    run(scenario())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1"])
def test_a_foreign_host_is_refused_even_when_signed(host: str) -> None:
    async def scenario() -> None:
        async with house() as home:
            status, headers, _ = await raw(home, "GET", "/2025-09-09/microvms", host=host)
            assert (status, headers["x-amzn-errortype"]) == (403, "AccessDeniedException")

    run(scenario())


def test_localhost_is_a_name_of_ours() -> None:
    async def scenario() -> None:
        async with house() as home:
            host = f"localhost:{port_of(home)}"
            assert (await raw(home, "GET", "/2025-09-09/microvms", host=host))[0] == 200

    run(scenario())


def test_only_the_loopback_is_listened_on() -> None:
    async def scenario() -> None:
        async with house() as home:
            assert home.info.endpoint_url.startswith("http://127.0.0.1:")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.2", port_of(home))

    run(scenario())


def test_a_gateways_fault_is_an_html_page() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.faults.add(parse_fault({"kind": "api-html-502"}))
            status, headers, body = await raw(home, "GET", "/2025-09-09/microvms")
            assert (status, headers["content-type"]) == (502, "text/html")
            assert b"502 Bad Gateway" in body

    run(scenario())


def test_a_body_that_is_too_long_is_refused() -> None:
    async def scenario() -> None:
        async with house() as home:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(home))
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")  # and closed
            writer.close()

    run(scenario())


def test_a_204_has_no_body() -> None:
    async def scenario() -> None:
        async with house() as home:
            arn = await home.active_image()
            status, headers, body = await raw(
                home, "POST", f"/2017-03-31/tags/{arn}", b'{"Tags": {"a": "b"}}'
            )
            assert (status, body) == (204, b"")
            assert "content-length" not in headers

    run(scenario())


def test_a_fault_of_ours_is_a_500_without_details() -> None:
    async def scenario() -> None:
        async with house() as home:
            home.context.state.close()
            status, headers, body = await raw(home, "GET", "/2025-09-09/microvms")
            assert (status, headers["x-amzn-errortype"]) == (500, "InternalServerException")
            assert json.loads(body) == {"message": None}

    # The state is closed a second time when the service ends, which sqlite allows.
    run(scenario())


# -- the internal endpoint


async def fault(home: House, **order: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"op": "add", "fault": order}).encode()
    status, _, answered = await raw(home, "POST", "/_local/faults", body)
    return status, json.loads(answered)


def test_faults_are_ordered_over_a_signed_endpoint() -> None:
    async def scenario() -> None:
        async with house() as home:
            assert await fault(home, kind="run-hook") == (200, {"id": 1})
            listing = await raw(home, "POST", "/_local/faults", b'{"op": "list"}')
            assert [f["kind"] for f in json.loads(listing[2])["faults"]] == ["run-hook"]
            status, answered = await fault(home, kind="no")
            assert status == 400
            assert "There is no fault 'no'" in answered["message"]
            unsigned = await raw(home, "POST", "/_local/faults", b"{}", headers={})
            assert unsigned[0] == 403

    run(scenario())


def test_commands_expire_tokens_jump_clocks_and_kill() -> None:
    async def scenario() -> None:
        async with house(clock=SystemClock()) as home:
            machine = await home.launch()
            await machine.reached(Phase.RUNNING)
            before_s = home.clock.now_s()
            assert (await fault(home, kind="clock-jump", seconds=3600))[0] == 200
            assert home.clock.now_s() - before_s >= 3600
            assert (await fault(home, kind="expire-tokens"))[0] == 200
            assert (await fault(home, kind="kill-machine", microvm_id="microvm-no"))[0] == 400
            # Signatures are checked against real time: still accepted after the jump.
            assert (await raw(home, "GET", "/2025-09-09/microvms"))[0] == 200

    run(scenario())
