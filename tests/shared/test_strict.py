"""Strict JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_guest.shared import strict


class WrongError(Exception):
    pass


def members(**value: Any) -> strict.Members:
    return strict.Members(value, WrongError)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b'"text"',
        b"null",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
        b'{"a": 1} trailing',
    ],
)
def test_what_is_not_one_plain_object_is_refused(text: bytes) -> None:
    with pytest.raises(strict.StrictJSONError):
        strict.loads_object(text, 10**7)


def test_size_is_checked_before_anything_is_parsed() -> None:
    with pytest.raises(strict.StrictJSONError, match="11 bytes, at most 10"):
        strict.loads_object(b"x" * 11, 10)


@pytest.mark.parametrize("kind", [bytes, memoryview, str])
def test_bytes_views_and_text_are_read(kind: Any) -> None:
    text = kind('{"a":1}') if kind is str else kind(b'{"a":1}')
    assert strict.loads_object(text, 100) == {"a": 1}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=30)
@given(value=st.dictionaries(st.text(), JSON, max_size=5))
def test_what_we_write_we_can_read(value: dict[str, Any]) -> None:
    assert strict.loads_object(strict.dumps(value), 10**6) == value


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        strict.dumps({"a": float("nan")})


def test_members_are_taken_by_type() -> None:
    found = members(number=1, text="a", none=None)
    assert found.integer("number", 0, 1) == 1
    assert found.text("text", 1) == "a"
    assert found.optional_text("none", 1) is None
    assert found.optional_text("absent", 1) is None
    assert found.take("absent", int, 7) == 7
    found.end()


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 2, [], {}])
def test_only_an_integer_in_bounds_is_an_integer(value: Any) -> None:
    with pytest.raises(WrongError, match="member a must be"):
        members(a=value).integer("a", 0, 1)


@pytest.mark.parametrize("value", [1, None, b"a", "ab", "\0", "\ud800"])
def test_only_clean_short_text_is_text(value: Any) -> None:
    with pytest.raises(WrongError, match="member a must be"):
        members(a=value).text("a", 1)


def test_what_is_left_over_is_refused() -> None:
    with pytest.raises(WrongError, match="unknown member 'b'"):
        members(b=1).end()
