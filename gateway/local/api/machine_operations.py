"""The operations on machines: run, get, list, suspend, resume, terminate, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.local.api import errors, idempotency
from gateway.local.api.context import Context
from gateway.local.api.parsing import Members
from gateway.local.behaviours import implements
from gateway.local.fleet import Launch
from gateway.local.interfaces import FaultPoint
from gateway.local.lifecycle import Phase, RefusedError
from gateway.local.machines import Machine
from gateway.local.settings import MAXIMUM_DURATION_S
from gateway.local.state import MachineRecord
from gateway.local.tokens import HEADER_NAME, TokenKind

Answer = dict[str, Any]

_CONNECTOR = "arn:aws:lambda:{region}:aws:network-connector:aws-network-connector:{name}"
_MAX_TOKEN_MINUTES = 60  # documented; the model itself has no maximum (LM 2.2)
_EVERY_PORT = (1, 65535)


@implements("run-defaults", "quota-402", "capacity-500")
async def run_microvm(context: Context, members: Members) -> Answer:
    """RunMicrovm: answers PENDING at once; the launch goes on by itself."""
    earlier = idempotency.replayed(context.state, "RunMicrovm", members)
    if earlier is not None:
        return await _show_earlier(context, earlier)
    _check_maximum_idle(members)
    image = context.catalog.runnable(members["imageIdentifier"], members.get("imageVersion"))
    if context.faults.take(FaultPoint.API_CAPACITY):
        raise errors.ApiError("InsufficientCapacityException", "Insufficient capacity.")
    if context.fleet.over_quota() or context.faults.take(FaultPoint.API_QUOTA):
        raise errors.memory_quota()
    machine = context.fleet.make(
        Launch(
            image=image,
            maximum_duration_s=members.get("maximumDurationInSeconds", MAXIMUM_DURATION_S),
            ingress=_connectors(context, members, "ingressNetworkConnectors", "HTTP_INGRESS"),
            egress=_connectors(context, members, "egressNetworkConnectors", "INTERNET_EGRESS"),
            payload=members.get("runHookPayload"),
            execution_role_arn=members.get("executionRoleArn"),
            kms_key_identifier=members.get("kmsKeyIdentifier"),
            idle_policy=members.get("idlePolicy"),
        )
    )
    # Remembered before the first await, so that a parallel call with the same token
    # meets this machine and not a second one.
    idempotency.remember(context.state, "RunMicrovm", members, machine.microvm_id)
    await context.fleet.begin(machine)
    return show_machine(machine.record)


async def _show_earlier(context: Context, microvm_id: str) -> Answer:
    if (machine := context.fleet.get(microvm_id)) is not None:
        await machine.opened()
    return show_machine(_record(context, microvm_id))


@implements("idle-limits-documented-maximum")
def _check_maximum_idle(members: Members) -> None:
    idle_s = members.get("idlePolicy", {}).get("maxIdleDurationSeconds", 0)
    if idle_s > MAXIMUM_DURATION_S:
        raise errors.validation(
            f"1 validation error detected: Value '{idle_s}' at "
            "'idlePolicy.maxIdleDurationSeconds' failed to satisfy constraint: "
            f"Member must have value less than or equal to {MAXIMUM_DURATION_S}"
        )


def _connectors(context: Context, members: Members, name: str, default: str) -> tuple[str, ...]:
    managed = _CONNECTOR.format(region=context.region, name=default)
    return tuple(members.get(name) or [managed])


@implements("get-shape-as-run")
async def get_microvm(context: Context, members: Members) -> Answer:
    return show_machine(_record(context, members["microvmIdentifier"]))


@implements("list-newest-first", "list-item-members")
async def list_microvms(context: Context, members: Members) -> Answer:
    """ListMicrovms: every state, ended machines too; a page at a time."""
    arn = members.get("imageIdentifier")
    if arn is not None:
        context.catalog.image(arn)
    size = members.get("maxResults", 50)
    rows = context.fleet.page(
        before=context.pager.open("ListMicrovms", members),
        limit=size + 1,
        arn=arn,
        version=members.get("imageVersion"),
    )
    token = None
    if len(rows) > size:
        rows = rows[:size]
        token = context.pager.seal("ListMicrovms", members, rows[-1][0])
    return {"items": [_show_item(record) for _, record in rows], "nextToken": token}


@implements("suspend-answers-empty")
async def suspend_microvm(context: Context, members: Members) -> Answer:
    machine = _changeable(context, members["microvmIdentifier"])
    _ask(machine, machine.suspend)
    return {}


async def resume_microvm(context: Context, members: Members) -> Answer:
    machine = _changeable(context, members["microvmIdentifier"])
    _ask(machine, machine.resume)
    return {}


@implements("terminate-idempotent-200")
async def terminate_microvm(context: Context, members: Members) -> Answer:
    microvm_id = members["microvmIdentifier"]
    _record(context, microvm_id)
    if (machine := context.fleet.get(microvm_id)) is not None:
        machine.terminate()
    return {}


@implements("conflict-409-wrong-state")
def _ask(machine: Machine, change: Any) -> None:
    try:
        change()
    except RefusedError as refusal:
        raise errors.conflict(
            f"The MicroVM {machine.microvm_id} is in state {refusal.phase.state} "
            "and its state cannot be changed."
        ) from None


def _changeable(context: Context, microvm_id: str) -> Machine:
    record = _record(context, microvm_id)
    machine = context.fleet.get(microvm_id)
    if machine is None or machine.phase is Phase.TERMINATED:
        raise errors.already_terminated(record.microvm_id)
    return machine


def _record(context: Context, microvm_id: str) -> MachineRecord:
    record = context.fleet.record(microvm_id)
    if record is None:
        raise errors.microvm_not_found(microvm_id)
    return record


# -- tokens


@implements("token-answer-map", "token-while-suspended", "token-minutes-maximum")
async def create_auth_token(context: Context, members: Members) -> Answer:
    """CreateMicrovmAuthToken: in any state but the last (LM 4.5)."""
    machine = _changeable(context, members["microvmIdentifier"])
    minutes = _minutes(members)
    ports = [_port_range(item) for item in members["allowedPorts"]]
    return _token(context, machine, ports, minutes, TokenKind.PORTS)


@implements("shell-token-needs-connector", "shell-token-all-ingress")
async def create_shell_auth_token(context: Context, members: Members) -> Answer:
    machine = _changeable(context, members["microvmIdentifier"])
    minutes = _minutes(members)
    names = {arn.rpartition(":")[2] for arn in machine.record.ingress}
    if "SHELL_INGRESS" not in names:
        raise errors.validation(
            "Shell access requires SHELL_INGRESS network connector to be configured on the MicroVM."
        )
    if "ALL_INGRESS" in names:
        raise errors.validation(
            "ALL_INGRESS cannot be combined with other ingress network connectors; "
            "use HTTP_INGRESS and/or SHELL_INGRESS instead"
        )
    return _token(context, machine, [_EVERY_PORT], minutes, TokenKind.SHELL)


def _minutes(members: Members) -> int:
    minutes: int = members["expirationInMinutes"]
    if minutes > _MAX_TOKEN_MINUTES:
        raise errors.validation(
            f"1 validation error detected: Value '{minutes}' at 'expirationInMinutes' failed to "
            "satisfy constraint: Member must have value less than or equal to "
            f"{_MAX_TOKEN_MINUTES}"
        )
    return minutes


def _port_range(item: Mapping[str, Any]) -> tuple[int, int]:
    if "port" in item:
        return (item["port"], item["port"])
    if "range" in item:
        first, last = item["range"]["startPort"], item["range"]["endPort"]
        if first > last:
            raise errors.validation("startPort must be less than or equal to endPort")
        return (first, last)
    return _EVERY_PORT


def _token(
    context: Context, machine: Machine, ports: list[tuple[int, int]], minutes: int, kind: TokenKind
) -> Answer:
    expires_s = context.clock.now_s() + 60 * minutes
    token = context.smith.mint(machine.microvm_id, ports, expires_s, kind)
    return {"authToken": {HEADER_NAME: token}}


# -- what is shown


@implements("extra-members")
def show_machine(record: MachineRecord) -> Answer:
    return {
        "microvmId": record.microvm_id,
        "state": record.state,
        "endpoint": record.endpoint,
        "imageArn": record.image_arn,
        "imageVersion": record.image_version,
        "executionRoleArn": record.execution_role_arn,
        "idlePolicy": record.idle_policy,
        "maximumDurationInSeconds": record.maximum_duration_s,
        "startedAt": record.started_at,
        "terminatedAt": record.terminated_at,
        "stateReason": record.state_reason,
        "terminationReasonCode": None,
        "kmsKeyIdentifier": record.kms_key_identifier,
        "ingressNetworkConnectors": list(record.ingress),
        "egressNetworkConnectors": list(record.egress),
    }


def _show_item(record: MachineRecord) -> Answer:
    return {
        "microvmId": record.microvm_id,
        "state": record.state,
        "imageArn": record.image_arn,
        "imageVersion": record.image_version,
        "startedAt": record.started_at,
    }
