"""One notebook, from launch to teardown.

Two nested parts. `_work` launches, sends inputs, executes and collects; it may be cancelled
at any await, by Ctrl-C or by its own errors. `run` wraps it: whatever happened inside, it
saves what there is and ends the kernel, which releases the machine, and nothing cancels
that. An interrupt therefore reaches only the work, and a second one finds the teardown
already going on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from gateway.batch.client import BatchClient, wait_until_ready
from gateway.batch.collect import collect_files
from gateway.batch.failures import Where, describe_failure, interrupted
from gateway.batch.host import KernelHost
from gateway.batch.inputs import InputFile, send_inputs
from gateway.batch.kernel import library_log
from gateway.batch.lifecycle_notes import compact, note_of
from gateway.batch.notebooks import PlannedRun, read_notebook, write_notebook
from gateway.batch.parameters import inject_parameters, notebook_language
from gateway.batch.phases import Stopwatch
from gateway.batch.progress import Moment, Progress
from gateway.batch.result import Failure, RunResult, Status
from gateway.clock import Clock
from gateway.errors import GatewayError, UsageError
from gateway.events import Event

# After launch_kernel the kernel has answered its own kernel_info already (JK 1.8); this bounds
# a kernel that hangs right then.
READY_TIMEOUT_S = 60.0
# How long the work may take to notice that it is cancelled before teardown goes on without it.
CANCEL_TIMEOUT_S = 10.0
# A long run saves while it goes on: at most this often, and for at most a twentieth of the time.
SAVE_INTERVAL_S = 10.0
SAVE_SHARE = 20
TICK_S = 0.5
# nbclient drops a cell's outputs that come later than this after its reply. On our link they come
# first; what may take longer than its 4 s is this process itself, with 200 MB to take apart.
IOPUB_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says about every notebook of it."""

    profile: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[InputFile] = ()
    collect: Sequence[str] = ()
    timeout_s: float | None = None
    allow_errors: bool = False


class NotebookRun:
    """One use: construct, `await run(stop)`, read the result."""

    def __init__(
        self,
        plan: PlannedRun,
        options: RunOptions,
        host: KernelHost,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._options = options
        self._host = host
        self._progress = progress
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self._result = RunResult(plan.source, options.profile)
        self._manager: AsyncKernelManager | None = None
        self._watched = False
        self._client: AsyncKernelClient | None = None
        self._executor: BatchClient | None = None
        self._notebook: NotebookNode | None = None
        self._numbers: dict[int, int] = {}
        self._cell: int | None = None
        self._saved_s = clock.monotonic_s()
        self._save_took_s = 0.0

    async def run(self, stop: asyncio.Event) -> RunResult:
        """Run until done or `stop` is set. Never raises for what a run can meet: see `failure`."""
        ticker = asyncio.create_task(self._tick())
        try:
            self._result.failure = await self._work_until(stop)
            self._watch()
            await self._save_partial()
            await self._end_kernel()
        finally:
            ticker.cancel()
        self._result.phases = self._stopwatch.finished
        return self._result

    # -- the work --------------------------------------------------------------

    async def _work_until(self, stop: asyncio.Event) -> Failure | None:
        work = asyncio.create_task(self._work())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=CANCEL_TIMEOUT_S)
            work.add_done_callback(_forget)
            return interrupted(await self._where())
        return await self._failure_of(work)

    async def _failure_of(self, work: asyncio.Task[None]) -> Failure | None:
        try:
            await work
        except Exception as error:
            library_log.debug("run of %s failed", self._plan.source, exc_info=True)
            return describe_failure(error, await self._where())
        return None

    async def _where(self) -> Where:
        alive = self._manager is not None and await self._manager.is_alive()
        reason = self._host.reason(self._manager) if self._manager else ""
        return Where(self._cell, len(self._numbers), self._options.timeout_s, alive, reason)

    async def _work(self) -> None:
        self._prepare()
        await self._launch()
        await self._connect()
        await self._send_inputs()
        try:
            await self._execute()
        except (CellExecutionError, CellTimeoutError):
            await self._collect_after_error()
            raise
        await self._collect()

    def _prepare(self) -> None:
        notebook = read_notebook(self._plan.source)
        if not inject_parameters(notebook, self._options.parameters):
            self._warn("No cell is tagged 'parameters'; the values were put first.")
        executing = (i for i, cell in enumerate(notebook.cells) if _executes(cell))
        self._numbers = {index: number for number, index in enumerate(executing, 1)}
        self._result.cells_total = len(self._numbers)
        self._notebook = notebook

    async def _launch(self) -> None:
        manager = self._host.make_manager()
        self._manager = manager
        with self._phase("launch"):
            await manager.start_kernel(
                extra_arguments=list(self._host.extra_arguments), cwd=str(self._plan.folder)
            )
        self._watch()

    async def _connect(self) -> None:
        assert self._manager is not None
        client: Any = self._manager.client()
        self._client = client
        with self._phase("connect"):
            client.start_channels()
            client.allow_stdin = False
            language = await wait_until_ready(client, READY_TIMEOUT_S)
        self._require_language(language)

    def _require_language(self, language: str) -> None:
        assert self._notebook is not None
        wanted = notebook_language(self._notebook)
        if language and wanted.lower() != language.lower():
            raise UsageError(
                f"{self._plan.source.name} is written in {wanted}, but the profile "
                f"{self._options.profile!r} runs {language}; choose another with --profile."
            )

    async def _send_inputs(self) -> None:
        if self._options.inputs:
            assert self._manager is not None
            with self._phase("inputs"):
                await send_inputs(self._options.inputs, self._host.workspace(self._manager))

    async def _execute(self) -> None:
        assert self._notebook is not None
        timeout_s = self._options.timeout_s
        executor = BatchClient(
            self._notebook,
            self._manager,
            log=library_log,
            allow_errors=self._options.allow_errors,
            iopub_timeout=IOPUB_TIMEOUT_S,
            timeout_func=lambda cell: timeout_s,
            on_cell_execute=self._cell_begins,
            on_cell_executed=self._cell_ended,
        )
        executor.kc = self._client
        self._executor = executor
        with self._phase("execute"):
            await executor.async_execute()
        self._cell = None

    def _cell_begins(self, cell: NotebookNode, cell_index: int) -> None:
        self._cell = self._numbers.get(cell_index)
        self._progress.show(self._moment())

    async def _cell_ended(
        self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]
    ) -> None:
        self._result.cells_executed += 1
        self._result.cells_failed += execute_reply["content"]["status"] == "error"
        pause_s = max(SAVE_INTERVAL_S, SAVE_SHARE * self._save_took_s)
        if self._clock.monotonic_s() - self._saved_s > pause_s:
            await self._save()

    async def _collect(self) -> None:
        if not self._options.collect:
            return
        assert self._manager is not None
        with self._phase("collect"):
            self._result.collected = await collect_files(
                self._options.collect,
                self._host.workspace(self._manager),
                self._plan.collect_dir,
                self._plan.output,
            )
        if not self._result.collected:
            self._warn(f"--collect {' '.join(self._options.collect)} matched no file.")

    async def _collect_after_error(self) -> None:
        # What the cells before the error made may be what explains it. The error comes first:
        # trouble here is a warning.
        try:
            await self._collect()
        except GatewayError as error:
            self._warn(error.sentence)

    # -- the end ---------------------------------------------------------------

    async def _save_partial(self) -> None:
        """Save the notebook as far as it came; a run that never executed leaves none."""
        if self._executor is None:
            return
        try:
            await self._save()
        except UsageError as error:
            self._note_trouble(Failure(Status.REFUSED, error.sentence))

    async def _save(self) -> None:
        assert self._executor is not None
        assert self._notebook is not None
        begun_s = self._clock.monotonic_s()
        self._executor.join_streams()
        await asyncio.to_thread(write_notebook, self._notebook, self._plan.output)
        self._saved_s = self._clock.monotonic_s()
        self._save_took_s = self._saved_s - begun_s
        self._result.output = self._plan.output

    async def _end_kernel(self) -> None:
        """End the kernel, and with it the machine; what cannot be confirmed becomes a failure."""
        if self._manager is None:
            return
        with self._phase("teardown"):
            try:
                await self._shutdown(self._manager)
            except GatewayError as error:
                self._note_trouble(Failure(Status.TROUBLE, error.sentence))
            except Exception as error:
                library_log.debug("teardown failed", exc_info=True)
                sentence = f"The machine may still run: {type(error).__name__}: {error}"
                self._note_trouble(Failure(Status.TROUBLE, sentence))

    async def _shutdown(self, manager: AsyncKernelManager) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if manager.has_kernel:
            # Polite only when all went well: then atexit handlers of the notebook run.
            await manager.shutdown_kernel(now=self._result.failure is not None)
        else:
            await manager.cleanup_resources()
        await self._host.confirm_end(manager)

    def _note_trouble(self, failure: Failure) -> None:
        if self._result.failure is None:
            self._result.failure = failure
        else:
            self._warn(failure.sentence)

    # -- progress --------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._stopwatch.phase(name):
            self._progress.show(self._moment())
            yield

    def _moment(self) -> Moment:
        return Moment(
            notebook=self._plan.name,
            phase=self._stopwatch.current or "starting",
            elapsed_s=self._stopwatch.elapsed_s(),
            cell=self._cell if self._stopwatch.current == "execute" else None,
            cells=len(self._numbers),
            machine=self._result.machine.get("microvm_id"),
        )

    async def _tick(self) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                await self._clock.sleep_s(TICK_S)
                self._watch()
                self._progress.tick(self._moment())

    def _watch(self) -> None:
        """Follow the machine's lifecycle, from as early as there is one."""
        manager = self._manager
        if manager is None:
            return
        if not self._watched:
            loop = asyncio.get_running_loop()

            def listener(event: Event) -> None:
                loop.call_soon_threadsafe(self._on_event, event)

            self._watched = self._host.watch(manager, listener)
        if not self._result.machine:
            self._result.machine = self._host.machine(manager)

    def _on_event(self, event: Event) -> None:
        self._result.events.append(compact(event))
        if note := note_of(event):
            self._progress.note(f"{self._plan.name}: {note}")

    def _warn(self, text: str) -> None:
        self._result.warnings.append(text)
        self._progress.note(f"{self._plan.name}: {text}")


def _forget(work: asyncio.Task[None]) -> None:
    """An interrupted run's own error says nothing: nbclient turns cancelling into a dead kernel."""
    if not work.cancelled() and work.exception() is not None:
        library_log.debug("ended by the interrupt: %r", work.exception())


def _executes(cell: NotebookNode) -> bool:
    """nbclient's own rule for the cells it sends to the kernel."""
    skipped = BatchClient.skip_cells_with_tag.default_value in cell.metadata.get("tags", [])
    return cell.cell_type == "code" and bool(cell.source.strip()) and not skipped
