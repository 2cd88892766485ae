"""Credit accounts of both ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_guest.shared.credit import ReceiveCredit, SendCredit, message_cost
from kernel_guest.shared.errors import Fault, LinkProtocolError


def test_a_message_costs_more_than_its_bytes() -> None:
    assert message_cost(100, 1, 5) == 100 + 256 + 5 * 64
    assert message_cost(0, 1000, 0) == 256_000


def test_nothing_may_be_sent_before_a_window_is_known() -> None:
    assert not SendCredit().admits(1)


def test_the_window_or_one_message_alone() -> None:
    credit = SendCredit()
    credit.window = 100
    assert credit.admits(500)
    assert not credit.admits(500, messages=2)
    credit.spend(60)
    assert credit.admits(40)
    assert not credit.admits(41)
    credit.release(60)
    assert credit.admits(500)


def test_the_receiver_enforces_the_same_rule() -> None:
    credit = ReceiveCredit()
    credit.check(500, 100, 1)
    with pytest.raises(LinkProtocolError) as caught:
        credit.check(500, 100, 2)
    assert caught.value.fault is Fault.CREDIT_EXCEEDED
    credit.deliver(10, 60)
    credit.check(40, 100, 1)
    with pytest.raises(LinkProtocolError):
        credit.check(41, 100, 1)


def test_only_whole_messages_count_as_consumed() -> None:
    credit = ReceiveCredit()
    credit.deliver(10, 20)
    credit.deliver(5, 15)
    assert credit.consume(9) is False
    assert credit.outstanding == 35
    assert credit.consume(1) is True
    assert (credit.outstanding, credit.consumed_messages, credit.waiting_bytes) == (15, 1, 5)
    assert credit.consume(5) is True
    assert (credit.outstanding, credit.consumed_messages, credit.waiting_bytes) == (0, 2, 0)


@pytest.mark.parametrize("amount", [-1, 11])
def test_impossible_amounts_are_refused(amount: int) -> None:
    credit = ReceiveCredit()
    credit.deliver(10, 20)
    with pytest.raises(ValueError, match="consumed"):
        credit.consume(amount)
    assert credit.waiting_bytes == 10


def test_after_a_reset_late_consumption_counts_for_nothing_new() -> None:
    credit = ReceiveCredit()
    credit.deliver(10, 20)
    credit.consume(4)
    credit.reset()
    credit.deliver(3, 13)
    assert (credit.waiting_bytes, credit.outstanding) == (9, 13)
    assert credit.consume(6) is False
    assert credit.consume(3) is True
    assert (credit.waiting_bytes, credit.outstanding, credit.consumed_messages) == (0, 0, 1)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    amounts=st.lists(st.integers(0, 80), max_size=60),
)
def test_any_way_of_reporting_comes_to_the_same(sizes: list[int], amounts: list[int]) -> None:
    credit = ReceiveCredit()
    for size in sizes:
        credit.deliver(size, size + 10)
    for amount in amounts:
        credit.consume(min(amount, credit.waiting_bytes))
    credit.consume(credit.waiting_bytes)
    assert credit.consumed_messages == len(sizes)
    assert credit.outstanding == credit.waiting_bytes == 0
