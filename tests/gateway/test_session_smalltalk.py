"""What is answered without a machine, and what wakes one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.messages import Composer, MalformedMessage, Signer
from gateway.session.smalltalk import MAX_COMMS, MAX_REMEMBERED_BYTES, Effect, SmallTalk
from kernel_guest.shared.messages import Channel

COMPOSER = Composer(Signer(b""))
Parts = tuple[bytes, ...]
SHELL, CONTROL, IOPUB = Channel.SHELL, Channel.CONTROL, Channel.IOPUB


def message(msg_type: str, **content: Any) -> Parts:
    return COMPOSER.compose(msg_type, content, now_s=0)


def ask(
    talk: SmallTalk, channel: Channel, msg_type: str, in_flight: int = 0, **content: Any
) -> Any:
    answer = talk.answer(channel, message(msg_type, **content), in_flight=in_flight)
    return None if answer is None else (answer.reply_type, dict(answer.content))


@pytest.mark.parametrize(
    "msg_type",
    [
        "execute_request",
        "complete_request",
        "inspect_request",
        "is_complete_request",
        "comm_open",
        "comm_msg",
        "comm_close",
        "create_subshell_request",
    ],
)
def test_the_wake_list(msg_type: str) -> None:
    assert ask(SmallTalk(), SHELL, msg_type) is None


def test_kernel_info_is_answered_once_it_is_known() -> None:
    talk = SmallTalk()
    assert ask(talk, SHELL, "kernel_info_request") is None
    talk.observe(SHELL, message("kernel_info_reply", status="error"))
    talk.observe(
        SHELL, message("kernel_info_reply", status="ok", banner="b" * MAX_REMEMBERED_BYTES)
    )
    assert ask(talk, SHELL, "kernel_info_request") is None
    talk.observe(SHELL, message("kernel_info_reply", status="ok", banner="hi"))
    expected = ("kernel_info_reply", {"status": "ok", "banner": "hi"})
    assert ask(talk, SHELL, "kernel_info_request") == expected
    assert ask(talk, CONTROL, "kernel_info_request") == expected


def test_comms_are_known_from_the_link_and_gone_with_the_kernel() -> None:
    talk = SmallTalk()
    talk.observe(IOPUB, message("comm_open", comm_id="1", target_name="jupyter.widget"))
    talk.observe(SHELL, message("comm_open", comm_id="2", target_name="other"))
    talk.observe(IOPUB, message("comm_open", comm_id="3", target_name="other"))
    talk.observe(IOPUB, message("comm_close", comm_id="3"))
    talk.observe(IOPUB, message("comm_msg", comm_id="2"))
    every = ask(talk, SHELL, "comm_info_request")
    assert every[1]["comms"] == {
        "1": {"target_name": "jupyter.widget"},
        "2": {"target_name": "other"},
    }
    some = ask(talk, SHELL, "comm_info_request", target_name="other")
    assert list(some[1]["comms"]) == ["2"]
    talk.kernel_ended()
    assert ask(talk, SHELL, "comm_info_request")[1]["comms"] == {}


def test_a_hostile_guest_cannot_fill_the_memory() -> None:
    talk = SmallTalk()
    for number in range(MAX_COMMS + 5):
        talk.observe(IOPUB, message("comm_open", comm_id=str(number), target_name="t"))
    talk.observe(IOPUB, message("comm_open", comm_id="x" * 5000, target_name="t"))
    talk.observe(IOPUB, message("comm_open", comm_id=5, target_name=[]))
    talk.observe(IOPUB, (b"", b'{"msg_type":"comm_open"', b"", b"", b""))
    talk.observe(SHELL, (b"", b"_reply", b"", b"", b""))
    assert len(ask(talk, SHELL, "comm_info_request")[1]["comms"]) == MAX_COMMS


def test_history_usage_and_debugger_info() -> None:
    talk = SmallTalk()
    assert ask(talk, SHELL, "history_request")[1]["history"] == []
    assert ask(talk, CONTROL, "usage_request")[1]["status"] == "error"
    talk.observe(CONTROL, message("usage_reply", content={"kernel_cpu": 1}))
    assert ask(talk, CONTROL, "usage_request")[1] == {"content": {"kernel_cpu": 1}}
    fresh = ask(talk, CONTROL, "debug_request", command="debugInfo", seq=4)[1]
    assert (fresh["request_seq"], fresh["body"]["isStarted"]) == (4, False)
    known = {"command": "debugInfo", "request_seq": 1, "body": {"isStarted": True}}
    talk.observe(CONTROL, message("debug_reply", **known))
    again = ask(talk, CONTROL, "debug_request", command="debugInfo", seq=9)[1]
    assert (again["request_seq"], again["body"]["isStarted"]) == (9, True)
    assert ask(talk, CONTROL, "debug_request", command="attach") is None
    json.dumps(again)


def test_interrupt_and_shutdown_need_a_machine_only_while_something_runs() -> None:
    talk = SmallTalk()
    assert ask(talk, CONTROL, "interrupt_request")[1] == {"status": "ok"}
    assert ask(talk, CONTROL, "interrupt_request", in_flight=1) is None
    assert ask(talk, CONTROL, "shutdown_request", in_flight=1, restart=False) is None
    answer = talk.answer(CONTROL, message("shutdown_request", restart=True), in_flight=0)
    assert answer is not None
    assert answer.effect is Effect.KERNEL_ENDS
    assert answer.content == {"status": "ok", "restart": True}
    assert ask(talk, SHELL, "shutdown_request") is None


def test_completion_can_be_told_not_to_wake() -> None:
    talk = SmallTalk(wake_for_completion=False)
    reply = ask(talk, SHELL, "complete_request", code="pri", cursor_pos=3)[1]
    assert (reply["matches"], reply["cursor_start"]) == ([], 3)
    assert ask(talk, SHELL, "inspect_request")[1]["found"] is False


def test_nonsense_of_a_client_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        SmallTalk().answer(SHELL, (b"", b"{", b"", b"", b""), in_flight=0)
