"""The kernel manager of a batch run.

The profile comes from the command line. The kernelspec is made here, in memory: a run needs
none installed, and the one that the notebook names has no say (design 6.7: never from a
notebook's metadata).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from traitlets.config import Config

PROVISIONER_NAME = "microvm-provisioner"

KernelManagerFactory = Callable[[], AsyncKernelManager]

# jupyter_client and nbclient log a traceback for what we report in one sentence. Their lines
# go here, where `--debug` shows them and nothing else does.
library_log = logging.getLogger("gateway.batch.libraries")
library_log.addHandler(logging.NullHandler())
library_log.propagate = False


def profile_kernel_spec(profile: str) -> KernelSpec:
    """A kernelspec whose only content is our provisioner and the profile."""
    stanza = {"provisioner_name": PROVISIONER_NAME, "config": {"profile": profile}}
    return KernelSpec(
        argv=[],
        display_name=f"MicroVM ({profile})",
        language="python",
        metadata={"kernel_provisioner": stanza},
    )


def make_kernel_manager(spec: KernelSpec, config: Config | None = None) -> AsyncKernelManager:
    """A manager for exactly this kernelspec, which is looked up nowhere."""
    options: dict[str, Any] = {"config": config} if config is not None else {}
    manager = AsyncKernelManager(log=library_log, **options)
    manager._kernel_spec = spec
    return manager
