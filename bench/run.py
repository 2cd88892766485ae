"""Us and the stock local provisioner, side by side, as JSON lines. See README.md here.

python bench/run.py [--rounds N] [--series NAME …] [--output FILE]
python bench/run.py --compare BEFORE AFTER
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statistics_of_series import chance, percentile, rounded, spread

HERE = Path(__file__).resolve().parent
#: Side → kernel name. The local one is ipykernel's own kernelspec in this environment.
SIDES = {"ours": "microvm", "local": "python3"}
#: Ratio ours / local to reach at the median (issue 2, must show 6).
REACH = {
    "start_warm_ms": 0.35,
    "start_fresh_ms": 0.6,
    "round_trip_p50_ms": 1.35,
    "display_20mb_s": 2.0,
    "lines_5000_s": 1.15,
}
MIN_ROUNDS = 7

Record = dict[str, Any]
Measurement = Callable[[str], dict[str, float]]


# -- one round of each ----------------------------------------------------------


def start_warm(kernel_name: str) -> dict[str, float]:
    from measure import start_ms

    return {"start_warm_ms": start_ms(kernel_name)}


def start_fresh(kernel_name: str) -> dict[str, float]:
    command = [sys.executable, str(HERE / "measure.py"), "start", kernel_name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    return {"start_fresh_ms": json.loads(done.stdout)}


def in_a_kernel(kernel_name: str) -> dict[str, float]:
    import measure

    with measure.kernel(kernel_name) as client:
        trips = measure.round_trips_ms(client)
        lines, count = measure.lines_s(client)
        return {
            "round_trip_p50_ms": percentile(trips, 50),
            "round_trip_p95_ms": percentile(trips, 95),
            "display_20mb_s": measure.display_s(client),
            "lines_5000_s": lines,
            "lines_5000_missing": measure.LINES - count,
        }


GROUPS: dict[str, Measurement] = {
    "start_warm": start_warm,
    "start_fresh": start_fresh,
    "kernel": in_a_kernel,
}


# -- the run --------------------------------------------------------------------


@contextmanager
def private_environment() -> Iterator[None]:
    """Kernelspec, local service and Jupyter folders of this run's own; ended afterwards."""
    from gateway.cli.kernelspec import install_kernelspec
    from gateway.local import client

    with tempfile.TemporaryDirectory(prefix="mvb-") as folder:
        os.environ.update(
            JUPYTER_MICROVM_LOCAL_DIR=f"{folder}/local",
            JUPYTER_RUNTIME_DIR=f"{folder}/runtime",
            JUPYTER_DATA_DIR=f"{folder}/data",
            JUPYTER_CONFIG_DIR=f"{folder}/config",
            IPYTHONDIR=f"{folder}/ipython",
        )
        install_kernelspec(user=True)
        client.ensure_running(Path(folder, "local"), preset="fast")
        try:
            yield
        finally:
            client.stop(Path(folder, "local"), wait_s=20)


def rounds(group: str, count: int) -> Iterator[Record]:
    """Measure both sides ``count`` times, the order alternating, after one unrecorded start."""
    for kernel_name in SIDES.values():
        start_warm(kernel_name)
    for number in range(count):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        for side in order:
            for series, value in GROUPS[group](SIDES[side]).items():
                yield {"series": series, "side": side, "round": number, "value": round(value, 4)}


def summaries(records: list[Record]) -> Iterator[Record]:
    """One line per series: both spreads, the ratio of medians, and what was to be reached."""
    for series in dict.fromkeys(record["series"] for record in records):
        ours, local = (values_of(records, series, side) for side in SIDES)
        line: Record = {
            "summary": series, "ours": rounded(spread(ours)), "local": rounded(spread(local)),
        }  # fmt: skip
        if local_median := spread(local).median:
            line["ratio"] = round(spread(ours).median / local_median, 3)
        if series in REACH:
            line |= {"reach": REACH[series], "reached": line["ratio"] <= REACH[series]}
        yield line


def values_of(records: list[Record], series: str, side: str) -> list[float]:
    return [r["value"] for r in records if r["series"] == series and r["side"] == side]


def about_this_run(count: int) -> Record:
    from importlib.metadata import version

    names = ("jupyter_client", "ipykernel", "pyzmq", "tornado")
    return {
        "run": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count(),
        "rounds": count, "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in names},
    }  # fmt: skip


# -- comparing two runs -----------------------------------------------------------


def read_records(path: Path) -> list[Record]:
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)
    return [line for line in lines if "value" in line]


def comparison(before: list[Record], after: list[Record]) -> Iterator[Record]:
    """Per series and side: ratio of medians after / before, and the probability of chance."""
    for series in dict.fromkeys(record["series"] for record in before):
        for side in SIDES:
            old, new = values_of(before, series, side), values_of(after, series, side)
            if old and new and spread(old).median:
                yield {
                    "compare": series, "side": side,
                    "before": rounded(spread(old)), "after": rounded(spread(new)),
                    "ratio": round(spread(new).median / spread(old).median, 3),
                    "chance": round(chance(old, new), 4),
                }  # fmt: skip


# -- command line -----------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks; see bench/README.md.")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--series", action="append", choices=sorted(GROUPS))
    parser.add_argument("--output", type=Path, help="also write the lines there")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        for line in comparison(*map(read_records, options.compare)):
            print(json.dumps(line))
        return 0
    measure_all(options.series or list(GROUPS), options.rounds, options.output)
    return 0


def measure_all(groups: list[str], count: int, output: Path | None) -> None:
    """Measure and print as it goes, so that an interrupted run has said what it knows."""
    records: list[Record] = []
    lines: list[Record] = []

    def say(line: Record) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    say(about_this_run(count))
    with private_environment():
        for group in groups:
            for record in rounds(group, count):
                records.append(record)
                say(record)
    for line in summaries(records):
        say(line)
    if output is not None:
        output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
