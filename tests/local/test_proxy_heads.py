"""Heads: the platform's headers, ports, subprotocols, framing."""

from __future__ import annotations

import h11
import pytest

from gateway.local.proxy import heads
from gateway.local.proxy.heads import RefusedError, read_access

Pairs = list[tuple[str, str]]
UPGRADE: Pairs = [("Connection", "keep-alive, Upgrade"), ("Upgrade", "WebSocket")]


def request(
    headers: Pairs | None = None, *, method: str = "GET", target: str = "/", version: str = "1.1"
) -> h11.Request:
    return h11.Request(
        method=method,
        target=target,
        headers=[("Host", "127.0.0.1:9"), *(headers or [])],
        http_version=version,
    )


def sent(message: h11.Request | h11.Response | h11.InformationalResponse) -> Pairs:
    return [(name.decode(), value.decode()) for name, value in message.headers]


def forwarded(headers: Pairs) -> Pairs:
    incoming = request(headers)
    return sent(heads.forwarded_request(incoming, read_access(incoming)))


def test_the_whole_platform_namespace_is_stripped_in_any_spelling() -> None:
    incoming: Pairs = [
        ("X-aws-proxy-auth", "t"),
        ("x-AWS-Proxy-Auth", "t"),
        ("X-AWS-PROXY-PORT", "8080"),
        ("x-aws-proxy-anything-new", "1"),
        ("Authorization", "mine"),
        ("Cookie", "a=b"),
        ("X-aws-proxies", "kept"),
    ]
    assert forwarded(incoming) == [
        ("host", "127.0.0.1:9"),
        ("authorization", "mine"),
        ("cookie", "a=b"),
        ("x-aws-proxies", "kept"),
        ("connection", "close"),
    ]


def test_hop_by_hop_headers_stop_here() -> None:
    incoming: Pairs = [
        ("Connection", "x-mine, Keep-Alive, host, content-length"),
        ("X-Mine", "1"),
        ("Keep-Alive", "timeout=5"),
        ("TE", "trailers"),
        ("Proxy-Authorization", "x"),
        ("Upgrade", "h2c"),
        ("Content-Length", "3"),
    ]
    assert forwarded(incoming) == [
        ("host", "127.0.0.1:9"),
        ("content-length", "3"),
        ("connection", "close"),
    ]


def test_chunked_bodies_stay_chunked() -> None:
    assert ("transfer-encoding", "chunked") in forwarded([("Transfer-Encoding", "chunked")])


@pytest.mark.parametrize(
    ("headers", "port"),
    [
        ([], 8080),
        ([("X-aws-proxy-port", "9000")], 9000),
        ([("X-aws-proxy-port", "1"), ("x-aws-proxy-port", "1")], 1),
        ([*UPGRADE, ("Sec-WebSocket-Protocol", "lambda-microvms.port.9")], 9),
        (
            [
                *UPGRADE,
                ("Sec-WebSocket-Protocol", "a, lambda-microvms.port.9"),
                ("X-aws-proxy-port", "8"),
            ],
            8,
        ),
        ([("Sec-WebSocket-Protocol", "lambda-microvms.port.9")], 8080),  # no upgrade
    ],
)
def test_the_port_comes_from_header_then_subprotocol_then_default(
    headers: Pairs, port: int
) -> None:
    assert read_access(request(headers)).port() == port


@pytest.mark.parametrize("text", ["", "x", "0", "65536", "8080x", "-1", "+80", "8 0", "999999"])
def test_a_malformed_port_is_a_bad_request(text: str) -> None:
    headers: Pairs = [("X-aws-proxy-port", text)]
    with pytest.raises(RefusedError) as refused:
        read_access(request(headers)).port()
    assert (refused.value.status, refused.value.body) == (400, b"Invalid x-aws-proxy-port")
    item = [*UPGRADE, ("Sec-WebSocket-Protocol", "lambda-microvms.port.0")]
    with pytest.raises(RefusedError):
        read_access(request(item)).port()


def test_two_different_ports_are_malformed() -> None:
    headers: Pairs = [("X-aws-proxy-port", "1"), ("X-aws-proxy-port", "2")]
    with pytest.raises(RefusedError):
        read_access(request(headers)).port()


def offered(*items: str, extra: Pairs | None = None) -> heads.Access:
    headers: Pairs = [*UPGRADE, ("Sec-WebSocket-Protocol", ", ".join(items)), *(extra or [])]
    return read_access(request(headers))


def test_a_token_may_come_as_a_subprotocol_but_only_with_the_marker() -> None:
    access = offered("lambda-microvms", "lambda-microvms.authentication.a.b.c", "v1.kernel")
    assert access.token == "a.b.c"
    assert access.protocols == ("v1.kernel",)
    assert offered("lambda-microvms.authentication.a.b.c").token is None
    assert offered("lambda-microvms").token is None


def test_the_header_token_wins_and_two_different_ones_are_none() -> None:
    header: Pairs = [("X-aws-proxy-auth", "h")]
    assert offered("lambda-microvms", "lambda-microvms.authentication.s", extra=header).token == "h"
    twice: Pairs = [("X-aws-proxy-auth", "h"), ("x-aws-proxy-auth", "i")]
    assert read_access(request(twice)).token is None
    assert read_access(request([header[0], header[0]])).token == "h"


def test_only_an_upgrade_to_websocket_is_one() -> None:
    assert heads.is_upgrade(request(UPGRADE))
    assert not heads.is_upgrade(request(UPGRADE, method="POST"))
    assert not heads.is_upgrade(request([("Upgrade", "websocket")]))
    assert not heads.is_upgrade(request([("Connection", "upgrade"), ("Upgrade", "h2c")]))


def test_platform_subprotocols_are_stripped_from_an_upgrade() -> None:
    platform = "lambda-microvms, lambda-microvms.authentication.t, lambda-microvms.port.1"
    names = [name for name, _ in forwarded([*UPGRADE, ("Sec-WebSocket-Protocol", platform)])]
    assert names == ["host", "connection", "upgrade"]
    pairs: Pairs = [
        ("Sec-WebSocket-Protocol", f"{platform}, app.v1"),
        ("Sec-WebSocket-Protocol", "app.v2"),
    ]
    assert ("sec-websocket-protocol", "app.v1, app.v2") in forwarded([*UPGRADE, *pairs])


def switch(headers: Pairs, access: heads.Access) -> Pairs:
    response = h11.InformationalResponse(status_code=101, headers=headers)
    return sent(heads.forwarded_switch(response, access, "id"))


def test_the_marker_is_answered_only_where_it_was_offered_and_the_guest_is_silent() -> None:
    marker = ("sec-websocket-protocol", "lambda-microvms")
    assert marker in switch([("Upgrade", "websocket")], offered("lambda-microvms", "app"))
    assert switch([], offered("app")) == [("x-amzn-requestid", "id")]
    chosen = switch([("Sec-WebSocket-Protocol", "app")], offered("lambda-microvms", "app"))
    assert ("sec-websocket-protocol", "app") in chosen
    assert marker not in chosen


def test_a_response_gets_our_request_id_and_one_framing() -> None:
    response = h11.Response(
        status_code=200,
        headers=[
            ("Content-Length", "5"),
            ("Transfer-Encoding", "chunked"),
            ("X-Amzn-RequestId", "the guest's"),
            ("Connection", "close"),
            ("X-Mine", "1"),
        ],
    )
    passed = heads.forwarded_response(response, "ours")
    assert sent(passed) == [("x-mine", "1"), ("x-amzn-requestid", "ours")]


@pytest.mark.parametrize(
    "bad",
    [
        request([("Transfer-Encoding", "chunked"), ("Content-Length", "3")]),
        request([("Content-Length", "3"), ("Transfer-Encoding", "chunked")]),
        request([("Transfer-Encoding", "chunked")], version="1.0"),
        request(target="http://elsewhere/"),
        request(method="CONNECT", target="elsewhere:443"),
    ],
)
def test_what_two_readers_could_read_differently_is_refused(bad: h11.Request) -> None:
    with pytest.raises(RefusedError) as refused:
        heads.check_framing(bad)
    assert refused.value.status == 400


def test_ordinary_framings_pass() -> None:
    heads.check_framing(request([("Content-Length", "3")]))
    heads.check_framing(request([("Transfer-Encoding", "chunked")]))
    heads.check_framing(request(method="OPTIONS", target="*"))


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:10", "localhost", ""])
def test_a_foreign_host_fails_authentication(host: str) -> None:
    foreign = h11.Request(method="GET", target="/", headers=[("Host", host)])
    with pytest.raises(RefusedError) as refused:
        heads.check_host(foreign, 9)
    assert (refused.value.status, refused.value.body) == (403, b"Token authentication failed")


def test_our_own_host_in_both_spellings_passes() -> None:
    heads.check_host(request(), 9)
    heads.check_host(h11.Request(method="GET", target="/", headers=[("Host", "LocalHost:9")]), 9)


def test_a_refusal_is_plain_text_and_not_stored() -> None:
    made = dict(sent(heads.refusal(RefusedError(403, b"no"), "id", close=True)))
    assert made == {
        "cache-control": "private, no-store",
        "content-length": "2",
        "content-type": "text/plain; charset=utf-8",
        "x-amzn-requestid": "id",
        "connection": "close",
    }
    empty = dict(sent(heads.refusal(RefusedError(502), "id", close=False)))
    assert "content-type" not in empty
    assert "connection" not in empty
