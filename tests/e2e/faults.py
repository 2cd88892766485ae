"""Ordering a fault from the sandbox's local service, over its signed internal endpoint."""

from __future__ import annotations

import json
from typing import Any

import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.local import client
from tests.e2e.sandbox import Sandbox


def order_fault(box: Sandbox, kind: str, **parameters: Any) -> None:
    """Make a fault strike; the kinds are those of `gateway/local/faults/plan.py`."""
    _post(box, {"op": "add", "fault": {"kind": kind, **parameters}})


def clear_faults(box: Sandbox) -> None:
    """Withdraw what has not struck."""
    _post(box, {"op": "clear"})


def _post(box: Sandbox, order: dict[str, Any]) -> None:
    info = client.read_info(box.state_dir)
    assert info is not None
    body = json.dumps(order).encode()
    request = AWSRequest("POST", f"{info.endpoint_url}/_local/faults", data=body)
    keys = Credentials(info.access_key_id, info.secret_access_key)
    SigV4Auth(keys, "lambda", info.region).add_auth(request)
    answer = httpx.post(request.url, content=body, headers=dict(request.headers), timeout=30)
    assert answer.status_code == 200, answer.text
