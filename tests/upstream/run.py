"""Other projects' test suites, with the local provisioner and with ours, compared.

    python tests/upstream/run.py [--project NAME …] [--cache FOLDER] [--keep-baseline]

Fetches the sdists at the versions of constraints.txt (or requirements.txt beside this file), makes
a virtual environment of its own under the cache folder, runs each suite twice and prints what
differs. Exit code 0: nothing that the written list (exceptions.toml) does not name. A test that
fails with ours is run once more alone before it counts, and is named when that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from results import Outcome, compare, count, read_exceptions, read_junit, regressed
from suites import SUITES, Suite

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROVISIONER = "microvm-provisioner"
#: Of one suite; the longest takes about four minutes on two cores.
SUITE_LIMIT_S = 1_800


@dataclass(frozen=True)
class Workshop:
    """Where everything lies: sdists, environment, private folders, reports."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def environment(self, provisioner: str | None) -> dict[str, str]:
        """A process environment that depends on, and leaves, nothing of the user's."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        values = {
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            "JUPYTER_MICROVM_LOCAL_DIR": str(self.folder / "state"),
            # What the suites of Kernel Gateway and nbclient give their kernels by the environment.
            "JUPYTER_MICROVM_ENVIRONMENT": "TEST_VAR,NBEXECUTE_TEST_*,IPYKERNEL_CELL_NAME",
        }
        if provisioner:
            values["JUPYTER_DEFAULT_PROVISIONER_NAME"] = provisioner
        return values


def pinned_versions() -> dict[str, str]:
    """Project → version, from both files; names in the form of the index."""
    pins: dict[str, str] = {}
    for file in (ROOT / "constraints.txt", HERE / "requirements.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
                pins[_canonical(match[1])] = match[2]
    return pins


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def make_environment(shop: Workshop) -> None:
    """The virtual environment, made again when one of the files that define it changed."""
    files = (HERE / "requirements.txt", ROOT / "constraints.txt", ROOT / "pyproject.toml")
    state = "\n".join(file.read_text(encoding="utf-8") for file in files)
    stamp = shop.folder / "venv" / "made-from"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
        return
    print(f"Making {shop.folder / 'venv'} (a minute or two) ...", flush=True)
    venv.create(shop.folder / "venv", clear=True, with_pip=True)
    pip(shop, "install", "-c", str(files[1]), "-r", str(files[0]), "-e", str(ROOT))
    stamp.write_text(state, encoding="utf-8")


def pip(shop: Workshop, *arguments: str) -> None:
    command = [str(shop.python), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    subprocess.run(command, check=True)


def unpacked(shop: Workshop, project: str, version: str) -> Path:
    """The project's sdist, fetched once. Raises ``FileNotFoundError`` when it has no tests."""
    folder = shop.folder / "sdists" / f"{project}-{version}"
    if not folder.is_dir():
        options = ("--no-deps", "--no-binary", ":all:", "-d", str(folder.parent))
        pip(shop, "download", *options, f"{project}=={version}")
        (archive,) = folder.parent.glob(f"{project}-{version}.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder.parent, filter="data")
    return folder


def run_suite(
    shop: Workshop, suite: Suite, source: Path, provisioner: str | None, only: str = ""
) -> dict[str, Outcome]:
    """Run the suite (or the tests that match ``only``) and return its outcomes."""
    label = provisioner or "local"
    report = shop.folder / "reports" / f"{suite.project}-{label}{'-again' if only else ''}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    missing = [test for test in suite.tests if not (source / test).exists()]
    if missing:
        raise FileNotFoundError(f"the sdist of {suite.project} lacks {', '.join(missing)}")
    command = [
        str(shop.python), "-m", "pytest", *suite.tests, f"--junitxml={report}",
        "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short", *suite.options,
        *(f"--deselect={name}" for name in suite.deselect), *(("-k", only) if only else ()),
    ]  # fmt: skip
    with report.with_suffix(".log").open("wb") as log:
        subprocess.run(
            command, cwd=source, env=shop.environment(provisioner), stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, timeout=SUITE_LIMIT_S, check=False,
        )  # fmt: skip
    if not report.exists():
        tail = report.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-2_000:]
        raise RuntimeError(f"{suite.project} did not finish:\n{tail}")
    return read_junit(report)


def baseline(shop: Workshop, suite: Suite, source: Path, *, keep: bool) -> dict[str, Outcome]:
    """Outcomes with the local provisioner; from the last run when ``keep``."""
    stored = shop.folder / "reports" / f"{source.name}-baseline.json"
    if keep and stored.exists():
        return {n: Outcome(o) for n, o in json.loads(stored.read_text(encoding="utf-8")).items()}
    results = run_suite(shop, suite, source, None)
    stored.write_text(json.dumps(results), encoding="utf-8")
    return results


def second_look(
    shop: Workshop, suite: Suite, source: Path, ours: dict[str, Outcome], broken: list[str]
) -> list[str]:
    """Run what failed once more, alone; update ``ours``; return what passes now."""
    names = sorted({re.split(r"[\[]", name.rpartition("::")[2])[0] for name in broken})
    again = run_suite(shop, suite, source, PROVISIONER, only=" or ".join(names))
    passing = [name for name in broken if again.get(name) is Outcome.PASSED]
    ours.update(dict.fromkeys(passing, Outcome.PASSED))
    return passing


def check(
    shop: Workshop, suite: Suite, exceptions: dict[str, str], may_pass: set[str], *, keep: bool
) -> bool:
    """Run one suite both ways, print, and say whether all is as written."""
    source = unpacked(shop, suite.project, pinned_versions()[suite.project])
    local = baseline(shop, suite, source, keep=keep)
    ours = run_suite(shop, suite, source, PROVISIONER)
    print(f"\n{source.name}\n  local: {count(local)}\n  ours:  {count(ours)}", flush=True)
    suspects = [name for name in regressed(local, ours) if name not in exceptions]
    if suspects:
        for name in second_look(shop, suite, source, ours, suspects):
            print(f"  passes only alone: {name}")
    verdict = compare(local, ours, exceptions, may_pass)
    for name, reason in verdict.excused.items():
        print(f"  excused: {name}: {reason}")
    for name in verdict.regressions:
        print(f"  BROKEN:  {name}")
    for name in verdict.not_needed:
        print(f"  passes, remove it from exceptions.toml: {name}")
    return verdict.good


def stop_service(shop: Workshop) -> None:
    """End the private local service; a run leaves nothing behind."""
    command = [str(shop.python.parent / "jupyter-microvm"), "local", "stop"]
    subprocess.run(command, env=shop.environment(None), check=False, timeout=60)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "microvm-kernel-gateway" / "upstream"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", action="append", help="only this project; may be repeated")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--keep-baseline", action="store_true", help="reuse the last local results")
    options = parser.parse_args()
    shop = Workshop(options.cache.resolve())
    shop.folder.mkdir(parents=True, exist_ok=True)
    make_environment(shop)
    exceptions, may_pass = read_exceptions(HERE / "exceptions.toml")
    chosen = [s for s in SUITES if not options.project or s.project in options.project]
    try:
        good = [
            check(
                shop, suite, exceptions.get(suite.project, {}), may_pass, keep=options.keep_baseline
            )
            for suite in chosen
        ]
    finally:
        stop_service(shop)
        shutil.rmtree(shop.folder / "home", ignore_errors=True)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
