"""The kernel's iopub side, made so that a slow reader slows the kernel instead of losing output.

A stock kernel publishes through a socket that drops when its reader is 1000 messages behind, the
closing idle included: with the reader stopped for six seconds 1493 of 20 000 lines arrived
(techniques 2). Two cures were measured. Without a high-water mark nothing is lost, but a cell
that prints faster than the line carries grows the kernel until it is killed, with all its
variables. So the publisher blocks (`XPUB_NODROP`), and every place where output can pile up
before it is bounded:

    print ──▶ OutStream ──▶ events ──▶ iopub thread ──▶ libzmq ──▶ agent ──▶ link, journal
              TEXT_CHARS    QUEUE_*    one message      PIPE_MESSAGES; large ones IN_FLIGHT_BYTES

**Who waits.** Threads that run user code wait where they hand output over. The control thread
never waits there: interrupt, shutdown and the debugger must get through while a cell is held up,
and what it publishes is bounded by the requests it answers. The iopub thread waits only for
libzmq. A forked child of a cell has no iopub thread and sends as ipykernel does.

**Interrupts.** The main thread waits in Python locks, which a signal interrupts, and only inside
a cell is SIGINT not ignored (ipykernel). So `KeyboardInterrupt` ends a cell that is held up; the
traceback and the idle then queue behind its output and wait like everything else.

**Order.** ipykernel gives up waiting for a flush after ten seconds and goes on; the text would
then follow the idle, where nbclient no longer listens. In ours a flush waits as long as it takes.

**The end.** A kernel that ends first lets the iopub thread send what is queued, then gives libzmq
LINGER_MS to hand it over. Stock drops the queue, and waits one second.

The other differences to stock: text is published in pieces of at most TEXT_CHARS, so that one
large `print` neither blocks the link nor has to be encoded at once; output of subprocesses is
decoded across read boundaries (stock reads 1000 bytes at a time and turns a split character into
two replacement characters) and is not copied to the kernel's own log as well.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from ipykernel import iostream
from ipykernel.thread import CONTROL_THREAD_NAME

# Characters of text that one stream holds, and that one message carries at most.
TEXT_CHARS = 1024 * 1024

# What waits for the iopub thread. The count keeps a look at the queue short.
QUEUE_MESSAGES = 256
QUEUE_BYTES = 16 * 1024 * 1024

# What libzmq holds: a count for small messages, bytes for large ones. 256 x 64 KiB is 16 MiB.
PIPE_MESSAGES = 256
LARGE_BYTES = 64 * 1024
IN_FLIGHT_BYTES = 32 * 1024 * 1024

LINGER_MS = 10_000

# Normally a flush takes well under a millisecond; the control thread does not wait for a slow one.
_CONTROL_FLUSH_S = 0.1

_READ_BYTES = 64 * 1024

# A missed wake-up (two threads wait, one clears what the other waits for) costs this much.
_RECHECK_S = 0.1


def prepare_socket(socket: zmq.Socket[bytes]) -> None:
    """Set, before it is bound, what makes the iopub socket block."""
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, PIPE_MESSAGES)
    socket.setsockopt(zmq.XPUB_NODROP, 1)


class _Send:
    """A message on its way to the iopub thread, with its size."""

    __slots__ = ("arguments", "keywords", "size_bytes", "thread")

    def __init__(self, thread: IOPubThread, arguments: Any, keywords: Any) -> None:
        self.thread = thread
        self.arguments = arguments
        self.keywords = keywords
        self.size_bytes = _size(arguments[0])

    def __call__(self) -> None:
        self.thread._really_send(*self.arguments, **self.keywords)
        self.thread.progress.set()


class IOPubThread(iostream.IOPubThread):
    """Queues for the iopub thread as ipykernel does, up to a bound."""

    def __init__(self, socket: zmq.Socket[bytes], session: Any) -> None:
        super().__init__(socket, pipe=True, session=session)  # type: ignore[no-untyped-call]
        self.progress = threading.Event()
        self._in_flight: deque[tuple[zmq.MessageTracker, int]] = deque()

    def send_multipart(self, *args: Any, **kwargs: Any) -> None:
        """Schedule a send; waits while the queue is full, if this thread may wait."""
        send = _Send(self, args, kwargs)
        while self._is_full(send.size_bytes) and self.may_wait():
            self.progress.clear()
            if self._is_full(send.size_bytes):
                self.progress.wait(_RECHECK_S)
        self.schedule(send)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop the thread when it has sent what is queued. Called when the kernel ends."""
        if self.may_wait():
            sent = threading.Event()
            self.schedule(sent.set)  # type: ignore[no-untyped-call]
            sent.wait(LINGER_MS / 1000)
        super().stop()  # type: ignore[no-untyped-call]

    def may_wait(self) -> bool:
        """Whether the calling thread may be held up; see the module's header."""
        return threading.current_thread().name != CONTROL_THREAD_NAME and self.is_elsewhere()

    def is_elsewhere(self) -> bool:
        """Whether the iopub thread runs, in this process, and is not the calling thread."""
        if os.getpid() != self._master_pid or threading.current_thread() is self.thread:
            return False
        return self.thread.is_alive()

    def _is_full(self, size_bytes: int) -> bool:
        count = len(self._events)
        if count >= QUEUE_MESSAGES:
            return True
        if not count:
            return False  # a message larger than the bound goes alone
        queued = sum(getattr(event, "size_bytes", 0) for event in self._events.copy())
        return queued + size_bytes > QUEUE_BYTES

    def _really_send(self, msg: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        size_bytes = _size(msg)
        if size_bytes < LARGE_BYTES or os.getpid() != self._master_pid:
            super()._really_send(msg, *args, **kwargs)  # type: ignore[no-untyped-call]
            return
        self._wait_for_flight(size_bytes)
        frames = [zmq.Frame(part, track=True, copy=False) for part in msg]
        super()._really_send(frames, copy=False)  # type: ignore[no-untyped-call]
        trackers = [frame.tracker for frame in frames if frame.tracker is not None]
        self._in_flight.append((zmq.MessageTracker(*trackers), size_bytes))

    def _wait_for_flight(self, size_bytes: int) -> None:
        """Let libzmq write large messages before it gets more of them; iopub thread only."""
        while self._in_flight and self._in_flight[0][0].done:
            self._in_flight.popleft()
        while self._in_flight:
            if sum(size for _, size in self._in_flight) + size_bytes <= IN_FLIGHT_BYTES:
                return
            self._in_flight.popleft()[0].wait()


class OutStream(iostream.OutStream):
    """stdout and stderr of a kernel. Named like its base: libraries look at the name."""

    _held_chars = 0

    def write(self, string: str) -> int | None:  # type: ignore[override]  # None in a fork's child
        """As ipykernel's; waits when a bound's worth of text has not been taken yet."""
        written = super().write(string)
        self._held_chars += len(string)
        if self._held_chars > TEXT_CHARS and self.pub_thread.may_wait():
            self.flush()
        return written

    def flush(self) -> None:
        """Wait until what was written is with libzmq's thread, however long that takes."""
        thread = self.pub_thread
        if thread is None or not thread.is_elsewhere():
            super().flush()  # type: ignore[no-untyped-call]
            return
        taken = threading.Event()
        thread.schedule(self._flush)
        thread.schedule(taken.set)
        if not thread.may_wait():
            taken.wait(_CONTROL_FLUSH_S)
            return
        while not taken.wait(self.flush_timeout) and thread.thread.is_alive():
            pass

    def _rotate_buffers(self) -> Any:
        with self._buffer_lock:
            self._held_chars = 0
            return super()._rotate_buffers()  # type: ignore[no-untyped-call]

    def _flush_buffers(self) -> Iterator[tuple[dict[str, Any], str]]:
        for parent, text in super()._flush_buffers():  # type: ignore[no-untyped-call]
            for start in range(0, len(text), TEXT_CHARS):
                yield parent, text[start : start + TEXT_CHARS]

    def _watch_pipe_fd(self) -> None:
        """Publish what is written to the descriptor itself, by C code or a subprocess."""
        if self._fid is None:
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            while (data := os.read(self._fid, _READ_BYTES)) and self._should_watch:
                if text := decoder.decode(data):
                    self.write(text)
        except (OSError, ValueError):  # the descriptor or the stream was closed under us
            self._exc = sys.exc_info()


def _size(parts: Sequence[Any]) -> int:
    return sum(_part_size(part) for part in parts)


def _part_size(part: Any) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)
