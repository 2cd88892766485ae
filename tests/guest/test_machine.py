"""The machine's init, on real processes."""

from __future__ import annotations

import asyncio
import os
import signal

from kernel_guest.kernels import SpawnRequest
from tests.guest.machines import KEY, Machine, client_of


def test_a_forked_kernel_executes_and_its_end_is_reported(machine: Machine) -> None:
    async def scenario() -> None:
        async with machine.host() as host:
            ended: asyncio.Queue[tuple[int, int | None, int | None]] = asyncio.Queue()
            host.on_exit(lambda *event: ended.put_nowait(event))
            kernel = await host.spawn(SpawnRequest(key=KEY, cwd=str(machine.folder)))
            assert not kernel.cold
            async with client_of(kernel) as client:
                reply = await client.execute_interactive("x = 6 * 7", timeout=10)
                assert reply["content"]["status"] == "ok"
            assert await host.kill(kernel.pid)
            async with asyncio.timeout(10):
                assert await ended.get() == (kernel.pid, None, signal.SIGKILL)
            assert not await host.kill(kernel.pid)
            assert os.listdir(machine.folder / "run") == []

    asyncio.run(scenario())
