"""One daemon thread with one asyncio loop per process, and a few daemon workers.

Jupyter clients call from several loops and threads, some stopped between calls
or already closed (JK 1.5). So everything that lives (links, sockets, timers)
lives here, and front doors hop over: ``await bridge().run(coro)`` from any
loop, ``bridge().call(coro_fn, …)`` from plain code.

Interpreter exit shapes the rest. In ``atexit`` the default executor,
``asyncio.to_thread`` and name resolution through a loop raise, and Python 3.12
starts no new thread (JK 1.5); yet ``jupyter run`` shuts its kernel down there.
A daemon thread that already runs keeps working. Therefore the loop thread and
the workers are started before they are needed and blocking calls (boto3, name
resolution) go through ``work``, never through an executor.

After a fork none of the threads exist in the child: the child makes a bridge
of its own at the next use. The parent's one is kept referenced but never
touched there, so that its loop is not closed by a destructor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import jupyter_core.utils

__all__ = ["WORKERS", "Bridge", "bridge"]

T = TypeVar("T")
P = ParamSpec("P")

# Enough for a launch, a token and a teardown at once; the service's own rates
# (LM 11: 5 launches, 10 terminations a second) are the tighter bound.
WORKERS = 4


class _Job:
    """One blocking call and where its outcome goes."""

    __slots__ = ("call", "done")

    def __init__(self, call: Callable[[], Any], done: concurrent.futures.Future[Any]) -> None:
        self.call = call
        self.done = done

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # handed to whoever waits
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


class Bridge:
    """The loop thread and its workers. Made by :func:`bridge`, one per process."""

    def __init__(self, workers: int = WORKERS) -> None:
        self.pid = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop_started = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="microvm-bridge", daemon=True)
        self._workers = [
            threading.Thread(target=self._run_jobs, name=f"microvm-worker-{n}", daemon=True)
            for n in range(workers)
        ]
        for thread in (self._thread, *self._workers):
            thread.start()
        self._loop_started.wait()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._loop_started.set)
        self.loop.run_forever()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # an idle worker holds no references

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.pid == os.getpid()

    def on_loop(self) -> bool:
        """True when the caller already runs on the bridge's thread."""
        return threading.get_ident() == self._thread.ident

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the bridge's loop, awaited from any loop. Cancelling cancels it there too."""
        if self.on_loop():
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def call(
        self,
        function: Callable[P, Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a coroutine function on the loop and block until it ended. Not from the loop."""
        if self.on_loop():
            raise RuntimeError("Bridge.call would block the loop it waits for")
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self.loop).result()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a plain function on the loop soon; from any thread, in order."""
        if self.on_loop():
            function(*args)
        else:
            self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task on the loop and keep it referenced; from the loop only.

        The loop holds tasks weakly: one without another reference can be
        collected in the middle of an await.
        """
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Queue a blocking call for the workers; from any thread."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._jobs.put(_Job(call, done))
        return done

    def work(self, call: Callable[[], T]) -> Awaitable[T]:
        """Await a blocking call that runs on a worker. The call itself cannot be cancelled."""
        return asyncio.wrap_future(self.submit(call))

    def close(self) -> None:
        """End the threads; for tests. Tasks still running are cancelled."""
        for _ in self._workers:
            self._jobs.put(None)
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        for thread in (self._thread, *self._workers):
            thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


_lock = threading.Lock()
_current: Bridge | None = None
_from_before_fork: list[object] = []


def bridge() -> Bridge:
    """This process's bridge, made at the first use."""
    global _current
    with _lock:
        if _current is None or not _current.alive:
            _current = Bridge()
        return _current


def _after_fork_in_child() -> None:
    """The child has the memory of the threads but not the threads."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _from_before_fork.append(_current)
        _current = None
    _leave_the_callers_loop()


def _leave_the_callers_loop() -> None:
    """In a forked child: not the loop that jupyter_core keeps for this thread.

    It was made before the fork, so its epoll and its self-pipe are shared with the parent, and the
    child would eat the wakeups by which our thread tells the parent's loop that a call has ended
    (a hang in one of ten forks, 2026-11-30). Kept alive: closing it would change the shared epoll.
    """
    kept = jupyter_core.utils._loop
    inherited = kept.get()
    if inherited is not None:
        _from_before_fork.append(inherited)
        kept.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
