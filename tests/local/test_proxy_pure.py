"""The proxy's arithmetic: caps, frame boundaries, cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.local.faults.plan import Direction, Fault
from gateway.local.proxy.cuts import Ending, Passed, Tap
from gateway.local.proxy.frames import CLOSE_TO_CLIENT, CLOSE_TO_GUEST, FrameTracker
from gateway.local.proxy.limits import Bandwidth, RequestRate

TO_CLIENT, TO_GUEST = Direction.TO_CLIENT, Direction.TO_GUEST


# -- caps


def test_a_rate_has_a_burst_of_one_second_and_refills() -> None:
    rate = RequestRate(2.0, now_s=100.0)
    assert [rate.take(100.0) for _ in range(3)] == [True, True, False]
    assert rate.take(100.5)
    assert not rate.take(100.5)
    assert [rate.take(200.0) for _ in range(3)] == [True, True, False]


def test_a_clock_that_goes_back_gives_nothing() -> None:
    rate = RequestRate(1.0, now_s=100.0)
    assert rate.take(100.0)
    assert not rate.take(50.0)


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=40))
def test_bandwidth_is_kept_over_time_and_free_when_idle(sizes: list[int]) -> None:
    now_s = 5.0
    cap = Bandwidth(1000.0, now_s)
    for size in sizes:
        now_s += cap.charge(size, now_s)
    assert now_s - 5.0 == pytest.approx(sum(sizes) / 1000.0)
    assert cap.charge(0, now_s + 60.0) == 0.0


# -- frames


def frame(body: bytes, *, masked: bool) -> bytes:
    size = len(body)
    if size < 126:
        head = bytes([0x82, size])
    elif size < 65536:
        head = bytes([0x82, 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([0x82, 127]) + size.to_bytes(8, "big")
    if masked:
        return bytes([head[0], head[1] | 0x80]) + head[2:] + b"\0\0\0\0" + body
    return head + body


bodies = st.sampled_from([0, 1, 2, 125, 126, 127, 300, 65535, 65536, 70000]).map(bytes)
frames = st.builds(frame, bodies, masked=st.booleans())


@given(st.lists(frames, min_size=1, max_size=6), st.data())
def test_boundaries_are_found_however_the_bytes_are_split(
    sent: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(sent)
    ends = {0}
    for one in sent:
        ends.add(max(ends) + len(one))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)) | {len(stream)})
    tracker = FrameTracker()
    done = 0
    for cut in cuts:
        tracker.feed(stream[done:cut])
        done = cut
        assert tracker.at_boundary == (done in ends)


@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_finish_frame_stops_at_the_next_boundary(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(sent)
    ends = [0]
    for one in sent:
        ends.append(ends[-1] + len(one))
    at = data.draw(st.integers(0, len(stream)))
    tracker = FrameTracker()
    tracker.feed(stream[:at])
    rest = tracker.finish_frame(stream[at:])
    assert at + rest == next(end for end in ends if end >= at)
    assert tracker.at_boundary


# -- cuts


def cut(
    after_bytes: int,
    direction: Direction = TO_CLIENT,
    *,
    close_frame: bool = False,
    number: int = 1,
) -> Fault:
    return Fault(
        "cut",
        direction=direction,
        after_bytes=after_bytes,
        close_frame=close_frame,
        fault_id=number,
    )


def carried(passed: list[Passed], direction: Direction) -> bytes:
    return b"".join(data for one in passed for way, data in one.pieces if way is direction)


@given(st.integers(0, 60), st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6))
def test_a_plain_cut_passes_exactly_its_bytes(after_bytes: int, chunks: list[bytes]) -> None:
    tap = Tap(tracked=False)
    tap.arm(cut(after_bytes))
    passed = [tap.strike_if_due()]
    for chunk in chunks:
        if passed[-1].ending is Ending.NOT_YET:
            passed.append(tap.feed(TO_GUEST, b"other"))
            passed.append(tap.feed(TO_CLIENT, chunk))
    stream = b"".join(chunks)
    assert carried(passed, TO_CLIENT) == stream[:after_bytes]
    assert (passed[-1].ending is Ending.CUT) == (len(stream) >= after_bytes)
    assert sum(one.struck for one in passed) == (len(stream) >= after_bytes)


@given(
    st.lists(st.tuples(st.sampled_from(list(Direction)), bodies), min_size=1, max_size=8),
    st.integers(0, 1000),
    st.sampled_from(list(Direction)),
    st.integers(1, 400),
)
def test_a_cut_with_a_close_frame_never_breaks_a_frame(
    messages: list[tuple[Direction, bytes]], after_bytes: int, direction: Direction, chunk: int
) -> None:
    tap = Tap(tracked=True)
    tap.arm(cut(after_bytes, direction, close_frame=True))
    passed = [tap.strike_if_due()]
    streams = dict.fromkeys(Direction, b"")
    for way, body in messages:
        whole = frame(body, masked=way is TO_GUEST)
        streams[way] += whole
        pieces = (whole[at : at + chunk * 97] for at in range(0, len(whole), chunk * 97))
        passed.extend(tap.feed(way, piece) for piece in pieces)
    ended = [one for one in passed if one.ending is Ending.CLOSED]
    assert bool(ended) == (len(streams[direction]) >= after_bytes)
    assert sum(one.struck for one in passed) == bool(ended)
    for way, close in ((TO_CLIENT, CLOSE_TO_CLIENT), (TO_GUEST, CLOSE_TO_GUEST)):
        got = carried(passed, way)
        if ended:
            assert got.endswith(close)
            got = got.removesuffix(close)
        assert streams[way].startswith(got)
        tracker = FrameTracker()
        tracker.feed(got)
        assert tracker.at_boundary
    if ended:
        assert len(carried(passed, direction)) >= after_bytes


def test_a_frame_that_is_open_in_the_other_direction_is_finished_first() -> None:
    tap = Tap(tracked=True)
    whole = frame(b"x" * 10, masked=False)
    tap.feed(TO_CLIENT, whole[:4])
    tap.arm(cut(0, TO_GUEST, close_frame=True))
    struck = tap.strike_if_due()
    assert struck.ending is Ending.NOT_YET
    assert carried([struck], TO_GUEST) == CLOSE_TO_GUEST
    done = tap.feed(TO_CLIENT, whole[4:] + whole)
    assert done.ending is Ending.CLOSED
    assert carried([done], TO_CLIENT) == whole[4:] + CLOSE_TO_CLIENT


def test_arming_again_counts_anew_and_the_same_fault_goes_on_counting() -> None:
    tap = Tap(tracked=False)
    tap.arm(cut(10))
    tap.feed(TO_CLIENT, b"12345")
    tap.arm(cut(10))
    assert tap.feed(TO_CLIENT, b"67890").ending is Ending.CUT
    tap = Tap(tracked=False)
    tap.arm(cut(10))
    tap.feed(TO_CLIENT, b"12345")
    tap.arm(cut(10, number=2))
    assert tap.feed(TO_CLIENT, b"67890").ending is Ending.NOT_YET
    tap.arm(None)
    assert tap.feed(TO_CLIENT, b"x" * 100).ending is Ending.NOT_YET
    assert tap.cut is None
