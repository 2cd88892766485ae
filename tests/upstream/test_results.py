"""The comparison itself, and the rules of the written list."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream.results import (
    MAX_EXCEPTIONS,
    Outcome,
    compare,
    count,
    read_exceptions,
    read_junit,
)

REPORT = """<testsuites><testsuite>
<testcase classname="t" name="good"/>
<testcase classname="t" name="bad"><failure>x</failure></testcase>
<testcase classname="t" name="late"/>
<testcase classname="t" name="late"><error>teardown</error></testcase>
<testcase classname="t" name="no"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_and_the_worse_outcome_counts(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = read_junit(path)
    assert found == {
        "t::good": Outcome.PASSED,
        "t::bad": Outcome.FAILED,
        "t::late": Outcome.FAILED,
        "t::no": Outcome.SKIPPED,
    }
    assert count(found) == "1 passed, 2 failed, 1 skipped"


def test_only_what_local_passes_can_be_broken() -> None:
    local = {"a": Outcome.PASSED, "b": Outcome.FAILED, "c": Outcome.PASSED, "d": Outcome.PASSED}
    ours = {"a": Outcome.FAILED, "b": Outcome.FAILED, "c": Outcome.PASSED}
    verdict = compare(local, ours, {"d": "why", "c": "obsolete"})
    assert verdict.regressions == ("a",)
    assert verdict.excused == {"d": "why"}
    assert verdict.not_needed == ("c",)
    assert not verdict.good
    assert compare({}, {}, {"c": "slow"}, may_pass={"c"}).good


def test_our_own_list_keeps_its_rules() -> None:
    exceptions, _ = read_exceptions(Path(__file__).with_name("exceptions.toml"))
    assert sum(map(len, exceptions.values())) <= MAX_EXCEPTIONS


def test_too_many_exceptions_or_one_without_a_reason_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    entry = '[[exception]]\nproject = "p"\ntest = "t{}"\nreason = "{}"\n'
    path.write_text("".join(entry.format(n, "why") for n in range(11)))
    with pytest.raises(ValueError, match="at most 10"):
        read_exceptions(path)
    path.write_text(entry.format(1, " "))
    with pytest.raises(ValueError, match="no reason"):
        read_exceptions(path)
