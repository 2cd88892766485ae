"""Page tokens and rates."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.local.api.errors import ApiError
from gateway.local.api.paging import Pager
from gateway.local.api.rates import RateLimiter, TokenBucket


def pages(pager: Pager, items: list[int], size: int) -> list[list[Any]]:
    members: dict[str, Any] = {"maxResults": size}
    found = []
    while True:
        page = pager.page("ListX", members, items, lambda item: {"n": item})
        found.append([item["n"] for item in page["items"]])
        if page["nextToken"] is None:
            return found
        members["nextToken"] = page["nextToken"]


def test_pages_hold_every_item_once() -> None:
    assert pages(Pager(), list(range(7)), 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert pages(Pager(), list(range(6)), 3) == [[0, 1, 2], [3, 4, 5]]
    assert pages(Pager(), [], 3) == [[]]


def test_a_token_looks_as_recorded() -> None:
    token = Pager().seal("ListX", {}, 5)
    assert 688 <= len(token) <= 800
    assert token.endswith("=")
    assert len(base64.urlsafe_b64decode(token)) == len(token) // 4 * 3 - token.count("=")


@pytest.mark.parametrize("token", ["x", "=", "AAAA", "é", "A" * 704])
def test_a_token_that_is_not_ours_is_refused(token: str) -> None:
    with pytest.raises(ApiError) as caught:
        Pager().open("ListX", {"nextToken": token})
    assert caught.value.code == "ValidationException"


def test_a_token_belongs_to_its_listing_and_filters() -> None:
    pager = Pager()
    token = pager.seal("ListX", {"imageIdentifier": "a", "maxResults": 5}, 9)
    assert pager.open("ListX", {"imageIdentifier": "a", "nextToken": token, "maxResults": 3}) == 9
    for operation, members in (("ListY", {"imageIdentifier": "a"}), ("ListX", {})):
        with pytest.raises(ApiError):
            pager.open(operation, {**members, "nextToken": token})


def test_a_bucket_has_a_burst_and_a_rate() -> None:
    bucket = TokenBucket(5, now_s=100)
    assert [bucket.take(100) for _ in range(5)] == [0] * 5
    assert bucket.take(100) == pytest.approx(0.2)
    assert bucket.take(100.2) == 0
    assert bucket.take(100.2) > 0
    assert [bucket.take(1000) for _ in range(6)].count(0) == 5


def test_a_slow_rate_still_admits_one() -> None:
    bucket = TokenBucket(0.5, now_s=0)
    assert bucket.take(0) == 0
    assert bucket.take(0) == pytest.approx(2)


def test_each_operation_has_its_own_bucket() -> None:
    limiter = RateLimiter({"A": 1}, other_per_s=2)
    assert limiter.take("A", 0) == 0
    assert limiter.take("A", 0) > 0
    assert [limiter.take("B", 0) for _ in range(3)].count(0) == 2
