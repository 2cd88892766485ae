"""The service model that botocore ships, read once and used to route requests.

Nothing about an operation's path, members or status is typed by hand here: a
newer botocore brings a newer service (LM 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import unquote

import botocore.loaders
from botocore.model import OperationModel, ServiceModel, Shape

SERVICE = "lambda-microvms"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation with what routing and answering need of it."""

    name: str
    method: str
    status: int
    pattern: re.Pattern[str]
    fixed_query: frozenset[str]
    input_shape: Shape | None
    output_shape: Shape | None
    specificity: int


@dataclass(frozen=True, slots=True)
class Match:
    """A request's operation, with the decoded labels of its path."""

    operation: Operation
    labels: Mapping[str, str]


class ApiModel:
    """The model, indexed for the server."""

    def __init__(self, service: ServiceModel) -> None:
        self._service = service
        found = (_operation(service.operation_model(n)) for n in service.operation_names)
        self._operations = sorted(found, key=lambda operation: -operation.specificity)

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(self._operations)

    @cached_property
    def signing_name(self) -> str:
        name: str = self._service.signing_name
        return name

    def match(self, method: str, path: str) -> Match | None:
        """The operation of a request line; `path` is raw (still percent-encoded).

        Colons may come raw or as %3A (LM 2), so labels are matched before decoding.
        """
        for operation in self._operations:
            if operation.method == method and (found := operation.pattern.fullmatch(path)):
                labels = {name: unquote(value) for name, value in found.groupdict().items()}
                return Match(operation, labels)
        return None

    def error_shape(self, code: str) -> Shape:
        return self._service.shape_for(code)


@lru_cache(maxsize=1)
def load_model() -> ApiModel:
    """Read the model from the installed botocore."""
    raw = botocore.loaders.Loader().load_service_model(SERVICE, "service-2")
    return ApiModel(ServiceModel(raw, SERVICE))


def _operation(model: OperationModel) -> Operation:
    http: Mapping[str, Any] = model.http
    path, _, query = http["requestUri"].partition("?")
    return Operation(
        name=model.name,
        method=http["method"],
        status=http.get("responseCode", 200),
        pattern=_pattern(path),
        fixed_query=frozenset(filter(None, query.split("&"))),
        input_shape=model.input_shape,
        output_shape=model.output_shape,
        specificity=sum("{" not in segment for segment in path.split("/")),
    )


def _pattern(path: str) -> re.Pattern[str]:
    """`/a/{b}` as a pattern; a greedy label (`{b+}`) may hold slashes."""
    pieces = []
    for piece in re.split(r"(\{[^}]+\})", path):
        if piece.startswith("{"):
            label = piece[1:-1]
            inside = ".+" if label.endswith("+") else "[^/]+"
            pieces.append(f"(?P<{label.rstrip('+')}>{inside})")
        else:
            pieces.append(re.escape(piece))
    return re.compile("".join(pieces))
