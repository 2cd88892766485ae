"""clientToken: the same token gives the same answer, for ever (LM 3.5)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gateway.local.api.errors import client_token_clash
from gateway.local.behaviours import implements
from gateway.local.state import Replay, State


@implements("client-token-permanent")
def replayed(state: State, operation: str, members: Mapping[str, Any]) -> str | None:
    """What an earlier call with this token made, or None.

    Raises ApiError if that call had other parameters.
    """
    token = members.get("clientToken")
    earlier = state.replay(operation, token) if token else None
    if earlier is None:
        return None
    if earlier.fingerprint != _fingerprint(members):
        raise client_token_clash()
    return earlier.answer


def remember(state: State, operation: str, members: Mapping[str, Any], answer: str) -> None:
    """Keep what this call made, if it has a token."""
    if token := members.get("clientToken"):
        state.remember(operation, token, Replay(_fingerprint(members), answer))


def _fingerprint(members: Mapping[str, Any]) -> str:
    """A digest, because payloads and environment variables are sensitive."""
    kept = {name: value for name, value in members.items() if name != "clientToken"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
