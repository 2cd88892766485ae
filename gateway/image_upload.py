"""The zip of an image into S3, where AWS builds it from."""

from __future__ import annotations

from pathlib import Path

from gateway.control import map_error
from gateway.errors import UsageError
from gateway.profiles import ServiceAccess


def upload_to_s3(path: Path, destination: str, digest: str, access: ServiceAccess) -> str:
    """Put the zip below `BUCKET[/PREFIX]` and return its `s3://` address. Blocking.

    The name holds the digest, so that an image built earlier keeps its own artifact. The
    endpoint is boto3's own choice: `access.endpoint_url` is that of another service.
    Raises from gateway.errors.
    """
    bucket, _, prefix = destination.removeprefix("s3://").partition("/")
    if not bucket:
        raise UsageError(f"--bucket {destination!r} names no bucket.")
    key = "/".join(filter(None, [prefix.strip("/"), f"{path.stem}-{digest[:16]}.zip"]))
    import boto3  # costs a tenth of a second: only here

    try:
        session = boto3.Session(profile_name=access.aws_profile, region_name=access.region)
        session.client("s3").upload_file(str(path), bucket, key)
    except Exception as error:
        raise map_error("upload", error, access.region, bucket) from error
    return f"s3://{bucket}/{key}"


def region_of_environment(aws_profile: str | None) -> str:
    """The region that boto3 would use; raises UsageError when nobody says one."""
    import boto3

    try:
        region = boto3.Session(profile_name=aws_profile).region_name
    except Exception as error:
        raise map_error("region", error, "", "") from error
    if not region:
        raise UsageError("No AWS region is set: AWS_REGION, or c.MicroVMGateway.region.")
    return str(region)
