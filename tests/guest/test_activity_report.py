"""What a machine is busy with, as far as the guest can see."""

from __future__ import annotations

import os
import subprocess
import sys

from kernel_guest.activity_report import ActivityReport, cpu_seconds
from tests.support.waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_machine_without_a_kernel() -> None:
    report = ActivityReport().report(None, [])
    assert report == {
        "kernel_alive": False,
        "executing": 0,
        "executing_ids": [],
        "waiting_input": False,
        "kernel_cpu_s": 0.0,
        "children_cpu_s": 0.0,
        "children": 0,
        "late_outputs": 0,
        "late_output_age_s": None,
        "last_output_age_s": None,
    }


def test_output_after_the_end_of_a_cell_is_told_with_its_age() -> None:
    clock = Clock()
    activity = ActivityReport(clock)
    activity.on_output(late=False)
    clock.now_s += 5
    report = activity.report(None, [])
    assert (report["late_outputs"], report["last_output_age_s"]) == (0, 5.0)
    activity.on_output(late=True)
    clock.now_s += 7
    report = activity.report(None, ["a"])
    assert (report["late_outputs"], report["late_output_age_s"]) == (1, 7.0)
    clock.now_s -= 1000
    assert activity.report(None, [])["late_output_age_s"] == 0.0


def test_waiting_for_input_ends_with_the_answer_the_cell_or_the_kernel() -> None:
    activity = ActivityReport()
    for end in (
        activity.on_input_reply,
        lambda: activity.on_idle("a"),
        activity.on_kernel_exit,
    ):
        activity.on_input_request("a")
        assert activity.report(None, ["a"])["waiting_input"] is True
        end()
        assert activity.report(None, ["a"])["waiting_input"] is False


def test_a_long_queue_is_counted_and_its_head_named() -> None:
    ids = [str(number) for number in range(100)]
    report = ActivityReport().report(None, ids)
    assert report["executing"] == 100
    assert report["executing_ids"] == ids[:20]


def test_children_that_compute_are_seen() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        wait_until(lambda: cpu_seconds(parent.pid)[2] == 1, within_s=20, what="the child")
        before = cpu_seconds(parent.pid)[1]
        wait_until(lambda: cpu_seconds(parent.pid)[1] > before + 0.05, within_s=20)
        own_s = cpu_seconds(parent.pid)[0]
        assert own_s < 5
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    assert cpu_seconds(parent.pid) == (0.0, 0.0, 0)
