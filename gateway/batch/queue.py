"""Several notebooks, a few at a time, each with its own machine; and the signals that stop them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gateway.batch.host import KernelHost
from gateway.batch.notebooks import PlannedRun
from gateway.batch.progress import Progress
from gateway.batch.result import Failure, RunResult, Status
from gateway.batch.runner import NotebookRun, RunOptions
from gateway.clock import Clock

# SIGHUP: the terminal was closed. All three mean: stop the cells, keep what there is,
# terminate the machines.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_all(
    plans: Sequence[PlannedRun],
    options: RunOptions,
    host: KernelHost,
    progress: Progress,
    clock: Clock,
    *,
    jobs: int = 1,
) -> list[RunResult]:
    """Run every notebook, at most `jobs` at once; the results are in the order of `plans`.

    A failing notebook does not stop the others. A stop signal stops all of them: running ones
    are torn down, waiting ones never start.
    """
    stop = asyncio.Event()
    places = asyncio.Semaphore(jobs)

    async def run_one(plan: PlannedRun) -> RunResult:
        async with places:
            if stop.is_set():
                return _never_started(plan, options)
            return await NotebookRun(plan, options, host, progress, clock).run(stop)

    with _stopping_on_signals(stop, progress):
        return list(await asyncio.gather(*map(run_one, plans)))


def _never_started(plan: PlannedRun, options: RunOptions) -> RunResult:
    failure = Failure(Status.INTERRUPTED, "Interrupted before it started.")
    return RunResult(plan.source, options.profile, failure=failure)


@contextmanager
def _stopping_on_signals(stop: asyncio.Event, progress: Progress) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        again = "Still terminating" if stop.is_set() else "Stopping: terminating"
        progress.note(f"{again} every machine of this run; please wait.")
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
