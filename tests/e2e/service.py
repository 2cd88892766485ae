"""Talking to the sandbox's local service from the test process: quick listings, ordered faults.

`Sandbox.aws` shows that the unmodified AWS CLI works, at two seconds a call. Tests that only
want to know whether something is left ask through botocore here.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.session import Session

from gateway.local import client
from gateway.local.client import ServiceInfo
from tests.e2e.sandbox import Sandbox
from tests.support.waiting import wait_until

_clients: dict[str, Any] = {}


def _info(box: Sandbox) -> ServiceInfo:
    info = client.read_info(box.state_dir)
    assert info is not None, "the local service does not run"
    return info


def microvms(box: Sandbox) -> Any:
    """A botocore client of the sandbox's service."""
    info = _info(box)
    if info.endpoint_url not in _clients:
        _clients[info.endpoint_url] = Session().create_client(
            "lambda-microvms",
            region_name=info.region,
            endpoint_url=info.endpoint_url,
            aws_access_key_id=info.access_key_id,
            aws_secret_access_key=info.secret_access_key,
        )
    return _clients[info.endpoint_url]


def machine_states(box: Sandbox) -> dict[str, str]:
    """Machine id to state, of every machine there has been."""
    pages = microvms(box).get_paginator("list_microvms").paginate()
    return {item["microvmId"]: item["state"] for page in pages for item in page["items"]}


def assert_nothing_left(box: Sandbox) -> None:
    """Every machine is TERMINATED and none of their processes lives."""
    assert set(machine_states(box).values()) <= {"TERMINATED"}, machine_states(box)
    wait_until(
        lambda: not box.machine_processes(), within_s=10, what="no process of a machine left"
    )


def order_fault(box: Sandbox, kind: str, **parameters: Any) -> None:
    """Make a fault strike; the kinds are those of `gateway/local/faults/plan.py`."""
    _post(box, {"op": "add", "fault": {"kind": kind, **parameters}})


def clear_faults(box: Sandbox) -> None:
    """Withdraw what has not struck."""
    _post(box, {"op": "clear"})


def _post(box: Sandbox, order: dict[str, Any]) -> None:
    info = _info(box)
    body = json.dumps(order).encode()
    request = AWSRequest("POST", f"{info.endpoint_url}/_local/faults", data=body)
    keys = Credentials(info.access_key_id, info.secret_access_key)
    SigV4Auth(keys, "lambda", info.region).add_auth(request)
    answer = httpx.post(request.url, content=body, headers=dict(request.headers), timeout=30)
    assert answer.status_code == 200, answer.text
