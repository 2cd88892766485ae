"""Where an image's code comes from: an environment of this computer, or a zip.

- `file:///abs/prefix`, a folder with `bin/python`: machines run in that
  environment itself.  Percent-encode spaces (the model forbids them in a URI).
- `file:///abs/code.zip` and `s3://bucket/key.zip`: a zip with a `Dockerfile` at
  its root, as the real service wants it (LM 9.1).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gateway.local.behaviours import implements
from gateway.local.images.archive import MAX_ARCHIVE_BYTES
from gateway.local.interfaces import ImageBuildError

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment on this computer."""

    prefix: Path


@dataclass(frozen=True, slots=True)
class LocalZip:
    path: Path


@dataclass(frozen=True, slots=True)
class S3Zip:
    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class S3Access:
    """How S3 is reached: an endpoint that takes any credentials, such as moto's server."""

    endpoint_url: str | None
    region: str

    @classmethod
    def from_environment(cls, region: str) -> S3Access:
        return cls(os.environ.get("AWS_ENDPOINT_URL_S3"), region)


def parse_artifact(uri: str) -> Environment | LocalZip | S3Zip:
    """Raises ImageBuildError for a URI that is none of the three forms."""
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.scheme == "s3" and parts.netloc and path.strip("/"):
        return S3Zip(parts.netloc, path.lstrip("/"))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise ImageBuildError(
            f"The code artifact {uri} is neither s3://bucket/key.zip nor file:///absolute/path."
        )
    location = Path(path)
    return LocalZip(location) if location.is_file() else Environment(location)


def check_environment(environment: Environment) -> None:
    """Raises ImageBuildError when the folder is no Python environment."""
    python = environment.prefix / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ImageBuildError(
            f"{environment.prefix} is not a Python environment: "
            "it has no bin/python that can be run."
        )


@implements("artifact-s3-codes")
def fetch(source: S3Zip, target: Path, access: S3Access) -> None:
    """Download a zip from S3.  Blocking; called off the loop.  Raises ImageBuildError."""
    if access.endpoint_url is None:
        raise ImageBuildError(
            "S3_ACCESS_DENIED: the local service reaches S3 only through AWS_ENDPOINT_URL_S3, "
            "which was not set when it was started."
        )
    import botocore.exceptions

    try:
        _download(_client(access), source, target)
    except botocore.exceptions.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown")
        raise ImageBuildError(
            f"S3_{code.upper()}: s3://{source.bucket}/{source.key} cannot be read."
        ) from error
    except botocore.exceptions.BotoCoreError as error:
        raise ImageBuildError(f"S3_UNREACHABLE: {access.endpoint_url}: {error}") from error


def _client(access: S3Access) -> Any:
    """boto3 is imported only here: its import costs more than the service's start."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=access.endpoint_url,
        region_name=access.region,
        aws_access_key_id="local",
        aws_secret_access_key="local",  # noqa: S106  # the endpoint takes any
        config=Config(connect_timeout=5, read_timeout=30, s3={"addressing_style": "path"}),
    )


def _download(client: Any, source: S3Zip, target: Path) -> None:
    body = client.get_object(Bucket=source.bucket, Key=source.key)["Body"]
    written = 0
    with target.open("xb") as sink:
        for chunk in body.iter_chunks(_COPY_BYTES):
            written += len(chunk)
            if written > MAX_ARCHIVE_BYTES:
                raise ImageBuildError(
                    f"ARCHIVE_TOO_LARGE: it has more than {MAX_ARCHIVE_BYTES} bytes"
                )
            sink.write(chunk)
