"""Plain requests to the agent: what is believed, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.agent_http import AgentHttp
from gateway.bridge import bridge
from gateway.errors import GuestFault, Unreachable
from gateway.link_socket import ProxyAnswer
from tests.gateway.canned_service import Answer, CannedService, canned_service

GOOD = {"boot_id": "b", "kernel": "running", "generation": 2, "more": 1}


@pytest.fixture
def service() -> Iterator[CannedService]:
    with canned_service() as made:
        yield made


def ask(service: CannedService, call: Callable[[AgentHttp], Any]) -> Any:
    async def steps() -> Any:
        http = AgentHttp(bridge(), str(service.access.endpoint_url))
        try:
            return await call(http)
        finally:
            await http.close()
            await http.close()

    return bridge().call(steps)


def test_health_and_keep_awake(service: CannedService) -> None:
    service.will(Answer(body=GOOD), Answer(204, body=""))
    health = ask(service, lambda http: http.health({"X-aws-proxy-auth": "t"}))
    assert (health.boot_id, health.kernel, health.generation) == ("b", "running", 2)
    ask(service, lambda http: http.keep_awake({}))
    assert [path for _, path, _ in service.requests] == ["/health", "/keepawake"]


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        "[]",
        {},
        {"boot_id": 5, "kernel": "x", "generation": 1},
        "[" * 40_000,
        "x" * 70_000,
    ],
    ids=lambda body: str(body)[:10],
)
def test_a_hostile_health_answer_is_a_fault(service: CannedService, body: Any) -> None:
    service.will(Answer(body=body))
    with pytest.raises(GuestFault):
        ask(service, lambda http: http.health({}))


def test_refusals_and_redirects_are_told_by_status(service: CannedService) -> None:
    for status in (403, 502, 302):
        service.will(Answer(status, body="Access to port denied", headers={"Location": "/x"}))
        with pytest.raises(ProxyAnswer, match=str(status)) as caught:
            ask(service, lambda http: http.health({}))
        assert caught.value.status == status


def test_nobody_there() -> None:
    with canned_service() as gone:
        pass
    with pytest.raises(Unreachable):
        ask(gone, lambda http: http.health({}))
