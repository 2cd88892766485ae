"""Pages and their opaque tokens.

LM 2: page tokens are 688 to 800 bytes of URL-safe base64 with `=` padding.  Ours
hold the key of the last item, encrypted, bound to operation and filters, so that
no client comes to rely on what is inside.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.local.api.errors import validation
from gateway.local.behaviours import implements

DEFAULT_PAGE = 50
_NONCE_BYTES = 12
_PLAINTEXT_BYTES = 501  # makes the token 708 characters long, two of them padding
_PAGE_MEMBERS = ("maxResults", "nextToken")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Pager:
    """Seals and opens the page tokens of one service process."""

    key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    @implements("page-tokens-opaque")
    def seal(self, operation: str, members: Mapping[str, Any], last: Any) -> str:
        """The token for the page after `last`."""
        nonce = os.urandom(_NONCE_BYTES)
        plaintext = json.dumps(last).encode().ljust(_PLAINTEXT_BYTES)
        sealed = AESGCM(self.key).encrypt(nonce, plaintext, _context(operation, members))
        return base64.urlsafe_b64encode(nonce + sealed).decode("ascii")

    def open(self, operation: str, members: Mapping[str, Any]) -> Any:
        """The key of the last item already seen; None on the first page.

        Raises ApiError for a token that is not ours or belongs to another listing.
        """
        token = members.get("nextToken")
        if not token:
            return None
        try:
            raw = base64.b64decode(token, altchars=b"-_", validate=True)
            context = _context(operation, members)
            plaintext = AESGCM(self.key).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], context)
        except (binascii.Error, InvalidTag, ValueError):
            raise validation("Invalid nextToken provided") from None
        return json.loads(plaintext)

    def page(
        self,
        operation: str,
        members: Mapping[str, Any],
        items: Iterable[_T],
        show: Callable[[_T], dict[str, Any]],
    ) -> dict[str, Any]:
        """A page of a short in-memory listing, by position."""
        start = self.open(operation, members) or 0
        size = members.get("maxResults", DEFAULT_PAGE)
        chosen: Sequence[_T] = list(islice(items, start, start + size + 1))
        more = len(chosen) > size
        token = self.seal(operation, members, start + size) if more else None
        return {"items": [show(item) for item in chosen[:size]], "nextToken": token}


def _context(operation: str, members: Mapping[str, Any]) -> bytes:
    filters = {name: value for name, value in members.items() if name not in _PAGE_MEMBERS}
    text = json.dumps([operation, filters], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
