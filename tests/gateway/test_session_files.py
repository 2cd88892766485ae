"""Workspace files: what goes up from a folder, and what a guest may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.bridge import bridge
from gateway.errors import GuestFault, UsageError
from gateway.link import CallResult
from gateway.profiles import UploadLimits
from gateway.session import files
from tests.gateway.session_kit import Kit


class ScriptedLink:
    """Answers calls as a guest might."""

    def __init__(self, *answers: CallResult) -> None:
        self.answers = list(answers)

    async def call(self, op: str, args: Any = None, **_: Any) -> CallResult:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def make_folder(root: Path) -> None:
    (root / "data").mkdir()
    (root / "data" / "a.csv").write_text("1,2\n")
    (root / "run.sh").write_text("#!")
    (root / "run.sh").chmod(0o755)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("secret")
    (root / "outside").symlink_to("/etc")
    (root / "passwd").symlink_to("/etc/passwd")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "x.pyc").write_bytes(b"x")


def test_a_plan_holds_ordinary_files_and_follows_no_links(tmp_path: Path) -> None:
    make_folder(tmp_path)
    plan = files.plan_upload(str(tmp_path), UploadLimits())
    assert [(item.path, item.mode) for item in plan] == [("run.sh", 0o755), ("data/a.csv", 0o644)]


@pytest.mark.parametrize("limits", [UploadLimits(max_files=1), UploadLimits(max_bytes=3)])
def test_too_much_is_refused_and_says_what_to_do(tmp_path: Path, limits: UploadLimits) -> None:
    make_folder(tmp_path)
    with pytest.raises(UsageError, match=r"upload\.excludes"):
        files.plan_upload(str(tmp_path), limits)


def test_an_upload_arrives_before_the_first_cell(local_service: Kit, tmp_path: Path) -> None:
    make_folder(tmp_path)

    async def steps(kit: Kit) -> None:
        profile = kit.changed(workspace_source="upload")
        async with kit.kernel(profile=profile, folder=str(tmp_path)) as kernel:
            assert (await kernel.execute("open('data/a.csv').read()")).value == "'1,2\\n'"
            code = "import os; sorted(os.listdir('.')), os.access('run.sh', os.X_OK)"
            assert "run.sh" in (value := (await kernel.execute(code)).value)
            assert ".git" not in value
            assert value.endswith("True)")
            await kernel.execute("open('data/a.csv', 'w').write('new')")
        assert (tmp_path / "data" / "a.csv").read_text() == "1,2\n"  # a copy, not the folder

    local_service.run(steps)


def test_the_folder_itself_is_used_where_profile_and_engine_allow(
    local_service: Kit, tmp_path: Path
) -> None:
    async def steps(kit: Kit) -> None:
        async with kit.kernel(folder=str(tmp_path)) as kernel:
            await kernel.execute("open('made.txt', 'w').write('x')")
        assert (tmp_path / "made.txt").read_text() == "x"

    local_service.run(steps)


@pytest.mark.parametrize(
    "listed",
    [
        None,
        {"path": "x"},
        [{"path": "x", "size": -1, "mode": 0}],
        [{"path": 5, "size": 1, "mode": 0}],
        [{"path": "x" * 5000, "size": 1, "mode": 0}],
        ["x"],
        [{"path": "x", "size": 1, "mode": 0}] * 10_001,
    ],
    ids=range(7),
)
def test_a_hostile_listing_is_a_fault(listed: Any) -> None:
    async def steps() -> None:
        await files.listing(ScriptedLink(CallResult({"files": listed})), ["*"])  # type: ignore[arg-type]

    with pytest.raises(GuestFault):
        bridge().call(steps)


def test_an_endless_file_is_cut_off() -> None:
    async def steps() -> None:
        endless = ScriptedLink(CallResult({"eof": False}, b"x" * 1000))
        await files.get(endless, "x", 10_000)  # type: ignore[arg-type]

    with pytest.raises(GuestFault, match="more than 10000"):
        bridge().call(steps)
