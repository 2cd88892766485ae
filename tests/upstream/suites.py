"""Which tests of which projects are run through our provisioner (facts page JK, section 6 A).

Left out: tests of things that start no kernel, which cannot differ between two provisioners.
All six sdists carry their tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """One project's tests. Paths are relative to the unpacked sdist; ``deselect`` says why."""

    project: str
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    #: Fail in the stock environment too, or hang it: reason → names.
    deselect: tuple[str, ...] = ()


SUITES = (
    Suite(
        "jupyter_client",
        (
            "tests/test_client.py",
            "tests/test_kernelmanager.py",
            "tests/test_multikernelmanager.py",
            "tests/test_restarter.py",
            "tests/test_runapp.py",
            "tests/test_consoleapp.py",
        ),
        options=("-p", "no:asyncio"),
    ),
    Suite(
        "jupyter_server",
        ("tests/services/kernels", "tests/services/sessions/test_api.py"),
        options=("-p", "no:asyncio"),
    ),
    Suite(
        "nbclient",
        ("tests/test_client.py", "tests/test_cli.py"),
        # Unset, pytest-asyncio warns, and nbclient makes warnings errors.
        options=("-o", "asyncio_default_fixture_loop_scope=function"),
    ),
    Suite(
        "papermill",
        (
            "papermill/tests/test_execute.py",
            "papermill/tests/test_clientwrap.py",
            "papermill/tests/test_engines.py",
        ),
        options=("-p", "no:asyncio"),
    ),
    Suite(
        "jupyter_kernel_gateway",
        ("tests/test_jupyter_websocket.py", "tests/test_gatewayapp.py"),
        options=("-p", "no:asyncio"),
    ),
    Suite("jupyter_kernel_test", ("test_ipykernel.py",), options=("-p", "no:asyncio")),
)
