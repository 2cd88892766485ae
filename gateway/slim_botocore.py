"""A data loader for botocore that reads only what one client needs.

Making a client reads two things that ours has no use for: the names of all
400 services (a walk over the data folders, 20 ms) and ``endpoints.json`` (1.25 MB
of JSON, 30 to 50 ms). The first only checks that the service exists. The second
was replaced years ago by a rule set per service plus ``partitions.json``; what
botocore still takes from it for a service without an entry of its own is the
partition's name, DNS suffix and default signature, which ``partitions.json``
holds too. So this loader answers both from there.

Measured 2026-11-30, botocore 1.44.8: client creation 90 ms without, 30 with.
``tests/gateway/test_control.py`` compares endpoint, signing name and signing
region of the result with an ordinary boto3 client in all partitions, so a
change in botocore shows there.
"""

from __future__ import annotations

from typing import Any

from botocore.loaders import Loader
from botocore.session import Session

__all__ = ["SlimLoader"]


class SlimLoader(Loader):  # type: ignore[misc]
    """Use for a session that makes one client only."""

    @classmethod
    def like(cls, session: Session) -> SlimLoader:
        """With the search paths of the session's own loader (AWS_DATA_PATH, ~/.aws/models)."""
        usual: Loader = session.get_component("data_loader")
        loader = cls(include_default_search_paths=False)
        loader.search_paths.extend(usual.search_paths)
        return loader

    def list_available_services(self, type_name: str) -> list[str]:
        """Only ours; the base class looks for its data next and reports if it is missing."""
        return ["lambda-microvms"]

    def load_data_with_path(self, name: str) -> tuple[Any, str]:
        if name != "endpoints":
            result: tuple[Any, str] = super().load_data_with_path(name)
            return result
        partitions, path = super().load_data_with_path("partitions")
        return _endpoints_from(partitions), path


def _endpoints_from(partitions: dict[str, Any]) -> dict[str, Any]:
    return {"version": 3, "partitions": [_partition(item) for item in partitions["partitions"]]}


def _partition(item: dict[str, Any]) -> dict[str, Any]:
    return {
        "partition": item["id"],
        "dnsSuffix": item["outputs"]["dnsSuffix"],
        "regionRegex": item["regionRegex"],
        "regions": {name: {} for name in item["regions"]},
        "defaults": {
            "hostname": "{service}.{region}.{dnsSuffix}",
            "protocols": ["https"],
            "signatureVersions": ["v4"],
            "variants": [],
        },
        "services": {},
    }
