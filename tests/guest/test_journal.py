"""The journal: order, bounds, merging, and honest gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_guest.journal import Journal, JournalLimits
from kernel_guest.jupyter_parts import make_signer
from kernel_guest.shared.messages import Channel, Kind, LinkMessage, event, jupyter

KEY = b"k"
SIGN = make_signer(KEY, "hmac-sha256")


def message(
    msg_type: str, content: dict[str, object], parent: str = "p", channel: Channel = Channel.IOPUB
) -> LinkMessage:
    signed = [
        json.dumps({"msg_id": "m", "msg_type": msg_type}).encode(),
        json.dumps({"msg_id": parent}).encode(),
        b"{}",
        json.dumps(content).encode(),
    ]
    return jupyter(channel, [SIGN(signed), *signed])


def stream(text: str, name: str = "stdout", parent: str = "p") -> LinkMessage:
    return message("stream", {"name": name, "text": text}, parent)


def status(state: str = "idle") -> LinkMessage:
    return message("status", {"execution_state": state})


def drain(journal: Journal) -> list[LinkMessage]:
    return list(iter(journal.pop, None))


def text_of(messages: list[LinkMessage]) -> str:
    contents = [json.loads(m.parts[4]) for m in messages if m.kind is Kind.JUPYTER]
    return "".join(content.get("text", "") for content in contents)


def test_small_traffic_passes_through_memory_unchanged(tmp_path: Path) -> None:
    journal = Journal(JournalLimits(), tmp_path / "journal")
    sent = [stream(str(i)) for i in range(100)]
    for one in sent:
        journal.append(one)
    assert journal.statistics().disk_bytes == 0
    assert drain(journal) == sent
    assert journal.empty
    assert journal.pop() is None
    assert journal.statistics().memory_bytes == 0


def test_the_disk_takes_what_memory_does_not_and_keeps_the_order(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(JournalLimits(memory_bytes=8_000, disk_bytes=10**7), folder)
    sent = [stream(f"{i} ") for i in range(500)]
    for one in sent:
        journal.append(one)
    full = journal.statistics()
    assert full.memory_bytes <= 8_000
    assert full.disk_bytes > 0
    assert full.waiting == 500
    assert drain(journal) == sent
    assert list(folder.iterdir()) == []


def test_appending_while_draining_keeps_the_order(tmp_path: Path) -> None:
    journal = Journal(JournalLimits(memory_bytes=8_000, disk_bytes=10**7), tmp_path / "j")
    taken: list[LinkMessage] = []
    sent = [stream(f"{i} ") for i in range(2_000)]
    for index, one in enumerate(sent):
        journal.append(one)
        if index % 3 == 0 and (got := journal.pop()) is not None:
            taken.append(got)
    assert taken + drain(journal) == sent


def test_a_full_disk_merges_the_text_of_one_stream(tmp_path: Path) -> None:
    journal = Journal(JournalLimits(memory_bytes=40_000, disk_bytes=20_000), tmp_path / "j")
    journal.set_signer(SIGN)
    for i in range(1000):
        journal.append(stream(f"{i}\n"))
    got = drain(journal)
    assert text_of(got) == "".join(f"{i}\n" for i in range(1000))
    assert len(got) < 200
    assert journal.statistics().merged == 1000 - len(got)
    for one in got:
        assert one.parts[0] == SIGN(one.parts[1:5])


def test_streams_of_another_name_or_parent_are_not_merged() -> None:
    sent = [
        stream("a"),
        stream("b"),
        stream("c", name="stderr"),
        stream("d", parent="q"),
        stream("e", parent="q"),
    ]
    journal = Journal(JournalLimits(memory_bytes=10_000, disk_bytes=0))
    journal.set_signer(SIGN)
    filler = stream("x" * 8_000)
    journal.append(filler)
    for one in sent:
        journal.append(one)
    assert [text_of([one]) for one in drain(journal)[1:]] == ["ab", "c", "de"]


def test_a_change_of_key_seals_what_was_merged_before() -> None:
    journal = Journal(JournalLimits(memory_bytes=10_000, disk_bytes=0))
    journal.set_signer(SIGN)
    journal.append(stream("x" * 8_000))
    journal.append(stream("a"))
    journal.append(stream("b"))
    other = make_signer(b"other", "hmac-sha256")
    journal.set_signer(other)
    journal.append(stream("c"))
    journal.append(stream("d"))
    _, first, second = drain(journal)
    assert (text_of([first]), text_of([second])) == ("ab", "cd")
    assert first.parts[0] == SIGN(first.parts[1:5])
    assert second.parts[0] == other(second.parts[1:5])


def test_without_a_key_nothing_is_merged() -> None:
    journal = Journal(JournalLimits(memory_bytes=10_000, disk_bytes=0))
    journal.append(stream("x" * 8_000))
    journal.append(stream("a"))
    journal.append(stream("b"))
    assert len(drain(journal)) == 3


def test_the_gap_counts_truly_and_stands_where_the_loss_is() -> None:
    journal = Journal(JournalLimits(memory_bytes=8_000, disk_bytes=0))
    displays = [message("display_data", {"data": {"text/plain": "x" * 200}}) for _ in range(50)]
    for one in displays:
        journal.append(one)
    journal.append(status())
    got = drain(journal)
    kinds = [one.kind for one in got]
    assert kinds.count(Kind.GAP) == 1
    kept = kinds.index(Kind.GAP)
    assert got[:kept] == displays[:kept]
    assert got[kept + 1 :] == [status()]
    lost = displays[kept:]
    assert got[kept].json() == {
        "messages": len(lost),
        "bytes": sum(one.size_bytes for one in lost),
    }
    assert journal.statistics().dropped_messages == len(lost)


def test_what_a_client_waits_for_is_never_dropped() -> None:
    journal = Journal(JournalLimits(memory_bytes=4_000, disk_bytes=0))
    for _ in range(50):
        journal.append(message("display_data", {"data": "x" * 500}))
    kept = [
        status("busy"),
        status("idle"),
        message("execute_reply", {"status": "ok"}, channel=Channel.SHELL),
        event("kernel_exited", {"pid": 1}),
    ]
    for one in kept:
        journal.append(one)
    assert drain(journal)[-4:] == kept


def test_a_message_above_the_bound_passes_an_empty_journal() -> None:
    journal = Journal(JournalLimits(memory_bytes=1_000, disk_bytes=0))
    large = message("display_data", {"data": "x" * 100_000})
    journal.append(large)
    assert drain(journal) == [large]


def test_a_disk_that_refuses_counts_as_full_and_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(JournalLimits(memory_bytes=4_000, disk_bytes=10**6), folder)
    folder.rmdir()
    for _ in range(50):
        journal.append(message("display_data", {"data": "x" * 500}))
    assert isinstance(journal.disk_error, FileNotFoundError)
    got = drain(journal)
    assert sum(one.json()["messages"] for one in got if one.kind is Kind.GAP) > 0


def test_nonsense_from_a_kernel_is_carried_like_anything_else() -> None:
    journal = Journal(JournalLimits(memory_bytes=2_000, disk_bytes=0))
    journal.set_signer(SIGN)
    nonsense = [
        jupyter(Channel.IOPUB, [b"", b'"stream"', b"", b"", b""]),
        jupyter(Channel.IOPUB, [b"", b'{"msg_type":"stream"}', b"{}", b"{}", b"[1]"]),
        jupyter(Channel.IOPUB, [b"", b"\xff" * 10, b"\xff", b"{}", b"{"]),
    ]
    for one in nonsense * 3:
        journal.append(one)
    got = drain(journal)
    kept = [one for one in got if one.kind is Kind.JUPYTER]
    lost = sum(one.json()["messages"] for one in got if one.kind is Kind.GAP)
    assert len(kept) + lost == 9


def test_close_removes_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(JournalLimits(memory_bytes=1_000, disk_bytes=10**6), folder)
    for _ in range(50):
        journal.append(stream("x" * 100))
    assert list(folder.iterdir())
    journal.close()
    journal.close()
    assert not list(folder.iterdir())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stream"), st.sampled_from(["stdout", "stderr"]), st.integers(0, 400)),
        st.tuples(st.just("display"), st.just(""), st.integers(0, 2_000)),
        st.tuples(st.just("status"), st.just(""), st.just(0)),
        st.tuples(st.just("reply"), st.just(""), st.integers(0, 300)),
        st.tuples(st.just("pop"), st.just(""), st.integers(1, 8)),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, memory=st.integers(0, 20_000), disk=st.integers(0, 20_000))
def test_any_history_is_told_in_order_or_as_a_gap(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, str, int]],
    memory: int,
    disk: int,
) -> None:
    journal = Journal(JournalLimits(memory, disk), tmp_path_factory.mktemp("j"))
    journal.set_signer(SIGN)
    sent: list[LinkMessage] = []
    got: list[LinkMessage] = []
    for number, (what, name, size) in enumerate(steps):
        if what == "pop":
            got += [one for _ in range(size) if (one := journal.pop()) is not None]
            continue
        mark = f"<{number}>" + "x" * size
        if what == "stream":
            sent.append(stream(mark, name))
        elif what == "display":
            sent.append(message("display_data", {"data": mark}))
        elif what == "status":
            sent.append(message("status", {"execution_state": mark}))
        else:
            sent.append(message("execute_reply", {"data": mark}, channel=Channel.SHELL))
        journal.append(sent[-1])
        assert journal.statistics().disk_bytes <= disk
    got += drain(journal)
    check_told(sent, got)
    journal.close()


def check_told(sent: list[LinkMessage], got: list[LinkMessage]) -> None:
    """Every message is there once and in order, or counted by the gap in its place."""
    rest = list(sent)
    for one in got:
        if one.kind is Kind.GAP:
            count = one.json()["messages"]
            lost, rest = rest[:count], rest[count:]
            assert sum(each.size_bytes for each in lost) == one.json()["bytes"]
            assert all(b'"status"' not in each.parts[1] for each in lost)
            assert all(each.channel is Channel.IOPUB for each in lost)
        elif one == rest[0]:
            rest.pop(0)
        else:
            merged = text_of([one])
            while merged:
                piece = text_of([rest.pop(0)])
                assert merged.startswith(piece)
                merged = merged[len(piece) :]
    assert not rest
