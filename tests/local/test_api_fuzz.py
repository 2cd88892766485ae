"""Requests made from the model itself, sensible and not: never a 500, never a hang."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from botocore.model import Shape
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.local.api.model import Operation, load_model
from tests.local.in_process import ARN, BASE_IMAGE, ROLE, House, house, run
from tests.local.test_api_server import raw

EXAMPLES = 150
#: Values that get past the constraints, so that the operations themselves are reached.
KNOWN = [
    f"{ARN}env", f"{ARN}no", "env", "1.0", "2.0", BASE_IMAGE, ROLE, "microvm-1", "ACTIVE", "file:///",
    "s3://a/b", "ENABLED", "\ud800", "ä\0", "",
]  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def of_shape(shape: Shape) -> st.SearchStrategy[Any]:
    """A value of the shape's JSON type, mostly, and anything at all now and then."""
    return st.one_of(_typed(shape), _typed(shape), _typed(shape), json_values)


def _typed(shape: Shape) -> st.SearchStrategy[Any]:
    match shape.type_name:
        case "structure":
            return members_of(shape)
        case "list":
            return st.lists(of_shape(shape.member), max_size=3)
        case "map":
            return st.dictionaries(st.text(max_size=5), of_shape(shape.value), max_size=3)
        case "boolean":
            return st.booleans()
        case "integer" | "long":
            return st.sampled_from([0, 1, 60, 512, 2048, 8080, 28800, 65536]) | st.integers()
        case _:
            enum = shape.metadata.get("enum", [])
            return st.sampled_from([*KNOWN, *enum]) | st.text(max_size=12)


def members_of(shape: Shape) -> st.SearchStrategy[dict[str, Any]]:
    required = {name: of_shape(shape.members[name]) for name in shape.required_members}
    optional = {n: of_shape(m) for n, m in shape.members.items() if n not in required}
    return st.fixed_dictionaries(required, optional=optional)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Operation, dict[str, Any]]:
    operation = draw(st.sampled_from(load_model().operations))
    if operation.input_shape is None:
        return operation, {}
    return operation, draw(members_of(operation.input_shape))


def encoded(operation: Operation, members: dict[str, Any]) -> tuple[str, bytes]:
    """Request target and body, as a client would place the members."""
    shape = operation.input_shape
    assert shape is not None
    target, query, body = TARGETS[operation.name], [], {}
    for name, value in members.items():
        serialization = shape.members[name].serialization
        wire = serialization.get("name", name)
        text = quote(str(value), safe="", errors="replace") or "x"
        match serialization.get("location"):
            case "uri":
                target = target.replace("{%s}" % wire, text)  # noqa: UP031
            case "querystring":
                query.append(f"{wire}={text}")
            case _:
                body[wire] = value
    return f"{target}?{'&'.join(query)}" if query else target, json.dumps(body).encode()


def _targets() -> dict[str, str]:
    import botocore.session

    service = botocore.session.get_session().get_service_model("lambda-microvms")
    return {n: service.operation_model(n).http["requestUri"] for n in service.operation_names}


TARGETS = _targets()


async def answered(home: House, operation: Operation, members: dict[str, Any]) -> int:
    target, body = encoded(operation, members)
    status, _, content = await raw(home, operation.method, target, body)
    if status not in (204, 502):
        json.loads(content)
    return status


def test_no_request_of_the_models_shapes_is_a_fault_of_ours() -> None:
    made: list[tuple[Operation, dict[str, Any]]] = []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def collect(request: tuple[Operation, dict[str, Any]]) -> None:
        made.append(request)

    collect()

    async def scenario() -> None:
        async with house() as home:
            await home.active_image()
            for operation, members in made:
                status = await answered(home, operation, members)
                assert status < 500, (operation.name, members)

    run(scenario(), within_s=100)
