"""`pip install` in a notebook: importable at once, new version after a restart, all kept."""

from __future__ import annotations

import asyncio
import sysconfig
import zipfile
from pathlib import Path

from tests.guest.gateway_side import KEY, GatewaySide, serving
from tests.guest.machines import Machine


def make_wheel(folder: Path, name: str, version: str, source: str) -> Path:
    """A wheel of one module; enough for pip."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_install_import_restart_with_another_version(machine: Machine, tmp_path: Path) -> None:
    one = make_wheel(tmp_path, "kernel_guest_sample", "1.0", "v = 1")
    two = make_wheel(tmp_path, "kernel_guest_sample", "2.0", "v = 2")

    async def scenario() -> None:
        async with serving(machine) as served:
            gateway = GatewaySide()
            await gateway.run(served)
            async with gateway.link(served):
                assert (await gateway.start())["cold"] is False
                cell = await gateway.execute(f"%pip install -q --no-index --no-deps {one}")
                assert cell.status == "ok", cell.stdout
                assert (await gateway.execute("import kernel_guest_sample as s; s.v")).value == "1"
                child = "import kernel_guest_sample as s; print(s.v)"
                cell = await gateway.execute(f"!python -c '{child}'")
                assert cell.stdout.strip() == "1"
                await gateway.execute(f"%pip install -q --no-index --no-deps {two}")
                again = await gateway.call("restart", key=KEY, kernel_name=None, grace_s=0)
                assert again["cold"] is True
                assert (await gateway.execute("import kernel_guest_sample as s; s.v")).value == "2"

    asyncio.run(scenario())
    site = Path(sysconfig.get_path("purelib"))
    assert not list(site.glob("kernel_guest_sample*"))
