"""What every test run shares: a home of its own, and property tests that repeat exactly."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A run that fails must fail again: no random seed in `make test`. The long series search anew.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# A run under nohup ignores SIGHUP, and so would every process that a test compares with another.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Test modules import the provisioner while they are collected; what they test is in this process.
os.environ["JUPYTER_MICROVM_FIRST_CALLS"] = "0"

#: Names that lead a test to the developer's own Jupyter, AWS or local service.
FOREIGN = ("JUPYTER_", "AWS_", "IPYTHON", "KERNEL_")


@pytest.fixture(scope="session", autouse=True)
def private_home() -> Iterator[Path]:
    """HOME and the Jupyter folders of this run; nothing of the developer's is read or changed."""
    kept = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="home-") as made:
        for name in list(os.environ):
            if name.startswith(FOREIGN):
                del os.environ[name]
        runtime = Path(made, "run")
        runtime.mkdir(mode=0o700)
        os.environ.update(HOME=made, XDG_RUNTIME_DIR=str(runtime), JUPYTER_PLATFORM_DIRS="1")
        yield Path(made)
        os.environ.clear()
        os.environ.update(kept)
