"""The zip from which a guest image is made: Dockerfile, requirements, and the guest's wheel.

The wheel is made from the installed `kernel_guest` package, file by file, without a build
tool: it is a zip with two metadata files, and what runs in the machine is exactly what is
installed here. Same input, same bytes: no dates, sorted names, and stored rather than
compressed, because zlib's output differs between versions and the whole zip is below 1 MB.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from gateway.errors import UsageError

GUEST_DISTRIBUTION = "microvm-kernel-guest"
GATEWAY_DISTRIBUTION = "microvm-kernel-gateway"
DOCKERFILE = "Dockerfile"
REQUIREMENTS = "requirements.txt"

# What kernel_guest imports beyond the standard library; a test compares it with the code.
GUEST_REQUIREMENTS = ("cryptography", "ipykernel", "pyzmq", "tornado", "zstandard")

# The earliest date that a zip can hold.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = 0o100644 << 16


def guest_version() -> str:
    """The version of guest and gateway, which are released together."""
    return metadata.version(GATEWAY_DISTRIBUTION)


def image_folder() -> Path:
    """Where Dockerfile and requirements lie: in the installed package, or beside it in a checkout.

    Raises UsageError when neither exists.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "image_files", package.parent / "image"):
        if (folder / DOCKERFILE).is_file():
            return folder
    raise UsageError("The image's Dockerfile is missing in this installation; give --source.")


def build_image_zip(source: Path, extra_requirements: Sequence[Path] = ()) -> bytes:
    """The code artifact: Dockerfile at the root, requirements, wheel (LM 9.1).

    `extra_requirements` are requirement files whose lines are added, for a profile's own
    libraries. Raises UsageError for a file that cannot be read.
    """
    name, wheel = build_guest_wheel()
    requirements = [_read(source / REQUIREMENTS), *map(_read, extra_requirements)]
    return _zip(
        {
            DOCKERFILE: _read(source / DOCKERFILE),
            REQUIREMENTS: b"\n".join(part.rstrip() + b"\n" for part in requirements),
            name: wheel,
        }
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


def build_guest_wheel() -> tuple[str, bytes]:
    """File name and bytes of the guest's wheel (the binary distribution format, PEP 427)."""
    version = guest_version()
    prefix = f"{GUEST_DISTRIBUTION.replace('-', '_')}-{version}"
    info = f"{prefix}.dist-info"
    files = dict(_package_files())
    files[f"{info}/METADATA"] = _metadata(version).encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD").encode()
    return f"{prefix}-py3-none-any.whl", _zip(files)


def _package_files() -> dict[str, bytes]:
    spec = find_spec("kernel_guest")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("The package kernel_guest is not installed beside the gateway.")
    root = Path(spec.submodule_search_locations[0])
    chosen = [*root.rglob("*.py"), root / "py.typed"]
    return {f"kernel_guest/{path.relative_to(root).as_posix()}": _read(path) for path in chosen}


_WHEEL = """\
Wheel-Version: 1.0
Generator: microvm-kernel-gateway
Root-Is-Purelib: true
Tag: py3-none-any
"""


def _metadata(version: str) -> str:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {GUEST_DISTRIBUTION}",
        f"Version: {version}",
        "Summary: The guest of microvm-kernel-gateway: Jupyter kernels inside a MicroVM",
        "License: Apache-2.0",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {name}" for name in GUEST_REQUIREMENTS),
    ]
    return "\n".join(lines) + "\n"


def _record(files: Mapping[str, bytes], own_name: str) -> str:
    lines = [f"{name},sha256={_digest(files[name])},{len(files[name])}" for name in sorted(files)]
    return "\n".join([*lines, f"{own_name},,"]) + "\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3  # Unix, whatever this computer is: the mode below means that
            entry.external_attr = _FILE_MODE
            archive.writestr(entry, files[name])
    return stream.getvalue()
