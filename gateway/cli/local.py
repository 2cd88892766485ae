"""`jupyter microvm local start | status | stop | env | faults`: the local service by hand.

Nobody needs these commands: the embedded default starts the service and an idle one
ends itself. They are for looking at it, and for other programs that want to use it.
"""

# ruff: noqa: RUF012  # traitlets wants aliases, flags and subcommands as plain class attributes

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Enum, Float, Integer, List, Unicode

from gateway.cli.app import USAGE, MicroVMCommand
from gateway.config import load_gateway
from gateway.errors import LocalServiceTrouble, UsageError

if TYPE_CHECKING:
    from gateway.local.client import ServiceInfo

#: Variables that would win over, or spoil, the ones that `env` sets: a session token
#: belongs to other keys, and a configured endpoint for all services to another service.
_IN_THE_WAY = ("AWS_SESSION_TOKEN", "AWS_PROFILE")


class _LocalCommand(MicroVMCommand):
    """What the commands share: which service is meant."""

    takes_arguments = False

    state_dir = Unicode("", help="Folder of the local service.").tag(config=True)

    aliases = {**MicroVMCommand.aliases, "state-dir": "_LocalCommand.state_dir"}

    def _folder(self) -> str | None:
        """The folder asked for, else the configured one; None is the usual place."""
        return self.state_dir or load_gateway(self.config, self.log).local_state_dir or None

    def _running(self) -> ServiceInfo:
        from gateway.local.client import read_info

        info = read_info(self._folder())
        if info is None:
            raise LocalServiceTrouble("none is running; `jupyter microvm local start` starts it.")
        return info

    def start(self) -> None:
        """Called by traitlets after parsing."""
        super().start()
        if self.extra_args and not self.takes_arguments:
            raise UsageError(f"There is no argument {self.extra_args[0]!r} here; see --help.")
        self.act()

    def act(self) -> None:
        """The command itself; raises from the error tree."""
        raise NotImplementedError


class StartLocal(_LocalCommand):
    """Start the local service, or say that it runs."""

    name = "jupyter-microvm-local-start"
    description = "Start the local service of Lambda MicroVMs, or say that it runs."
    examples = """
    jupyter microvm local start
    jupyter microvm local start --preset realistic --set memory_quota_mib=8192
    """

    preset = Enum(
        ["fast", "realistic"], "fast", help="Timing: without delays, or with the measured ones."
    ).tag(config=True)
    port = Integer(0, help="Port of the control API; 0 is any free one.").tag(config=True)
    idle_exit_s = Float(
        0.0, help="End after so many seconds without machines and requests; 0 is never."
    ).tag(config=True)
    switches = List(Unicode(), help="A switch of the service as name=value; repeatable.").tag(
        config=True
    )

    aliases = {
        **_LocalCommand.aliases,
        "preset": "StartLocal.preset",
        "port": "StartLocal.port",
        "idle-exit-s": "StartLocal.idle_exit_s",
        "set": "StartLocal.switches",
    }

    def act(self) -> None:
        """Start it and print where it listens."""
        from gateway.local.client import ensure_running, read_info
        from gateway.local.settings import SettingError, preset_settings

        try:
            preset_settings(self.preset, self.switches)
        except SettingError as error:
            raise UsageError(str(error)) from error
        folder = self._folder()
        before = read_info(folder)
        info = before or ensure_running(
            folder,
            preset=self.preset,
            port=self.port or None,
            idle_exit_s=self.idle_exit_s or None,
            switches=tuple(self.switches),
        )
        verb = "already runs" if before else "runs"
        print(f"The local service {verb} at {info.endpoint_url} (process {info.pid}).")


class StatusLocal(_LocalCommand):
    """Show the local service and its machines."""

    name = "jupyter-microvm-local-status"
    description = "Show the local service and how many machines it has; exit code 3 if none runs."

    json_output = Bool(False, help="Print JSON.").tag(config=True)

    flags = {
        **MicroVMCommand.flags,
        "json": ({"StatusLocal": {"json_output": True}}, "Print JSON."),
    }

    def act(self) -> None:
        """Ask the service itself, so that what is printed is known to answer."""
        info = self._running()
        states = machine_states(info)
        facts: dict[str, Any] = {
            "endpoint_url": info.endpoint_url,
            "region": info.region,
            "pid": info.pid,
            "preset": info.preset,
            "uptime_s": round(time.time() - info.started_at, 1),
            "machines": states,
        }
        if self.json_output:
            print(json.dumps(facts))
            return
        counted = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none"
        print(f"endpoint   {info.endpoint_url}  (region {info.region})")
        print(f"process    {info.pid}, up {facts['uptime_s']:g} s, preset {info.preset}")
        print(f"machines   {counted}")


class StopLocal(_LocalCommand):
    """End the local service and all of its machines."""

    name = "jupyter-microvm-local-stop"
    description = "End the local service and all of its machines."

    def act(self) -> None:
        """Stop it; nothing to stop is fine."""
        from gateway.local.client import stop

        stopped = stop(self._folder())
        print("The local service has ended." if stopped else "No local service was running.")


class EnvLocal(_LocalCommand):
    """Print the variables that make any AWS SDK or CLI use the local service."""

    name = "jupyter-microvm-local-env"
    description = """Print the variables that make any AWS SDK or CLI use the local service.

    The service is started if there is none.
    """
    examples = """
    eval "$(jupyter microvm local env)"
    """

    def act(self) -> None:
        """Print lines for a POSIX shell."""
        from gateway.local.client import ensure_running

        info = ensure_running(self._folder())
        for name, value in info.environment().items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"unset {' '.join(_IN_THE_WAY)}")


class FaultsLocal(_LocalCommand):
    """Order faults of the local service, list them, clear them."""

    name = "jupyter-microvm-local-faults"
    description = "Order faults of the local service: add KIND [name=value ...], list, clear [ID]."
    examples = """
    jupyter microvm local faults add cut after_bytes=100 direction=to-client
    jupyter microvm local faults add api-429 times=3
    jupyter microvm local faults add kill-machine microvm_id=microvm-…
    jupyter microvm local faults list
    jupyter microvm local faults clear
    """

    takes_arguments = True

    def act(self) -> None:
        """Send one order and print the answer."""
        from gateway.local.client import call_internal

        order = fault_order(self.extra_args)
        answer = call_internal(self._running(), "/_local/faults", order)
        print(json.dumps(answer, indent=1))


def fault_order(arguments: list[str]) -> dict[str, Any]:
    """The document for the service from the words of the command.  Raises UsageError."""
    match arguments:
        case ["add", kind, *parameters]:
            return {"op": "add", "fault": {"kind": kind, **dict(map(_parameter, parameters))}}
        case ["list"] | []:
            return {"op": "list"}
        case ["clear"]:
            return {"op": "clear"}
        case ["clear", number] if number.isdecimal():
            return {"op": "clear", "id": int(number)}
    raise UsageError("Say `add KIND [name=value ...]`, `list` or `clear [ID]`.")


def _parameter(text: str) -> tuple[str, Any]:
    """`name=value`, the value as JSON where it is some."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not name=value.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class LocalApp(MicroVMCommand):
    """Start, stop and inspect the local service."""

    name = "jupyter-microvm-local"
    description = "Start, stop and inspect the local service of Lambda MicroVMs."
    examples = "    jupyter microvm local status"
    subcommands = {
        "start": (StartLocal, "Start the service, or say that it runs"),
        "status": (StatusLocal, "Show the service and its machines"),
        "stop": (StopLocal, "End the service and its machines"),
        "faults": (FaultsLocal, "Order, list and clear faults"),
        "env": (EnvLocal, "Print the variables for AWS SDKs and the CLI"),
    }

    def start(self) -> None:
        """Without a subcommand there is nothing to do but to say what there is."""
        super().start()
        if self.extra_args:
            known = ", ".join(self.subcommands)
            raise UsageError(f"There is no command {self.extra_args[0]!r}; there are {known}.")
        self.print_help()
        self.exit(USAGE)


def machine_states(info: ServiceInfo) -> dict[str, int]:
    """How many machines are in each state, asked over the API.

    Raises LocalServiceTrouble if the service does not answer.
    """
    import botocore.exceptions
    import botocore.session
    from botocore.config import Config

    client = botocore.session.get_session().create_client(
        "lambda-microvms",
        endpoint_url=info.endpoint_url,
        region_name=info.region,
        aws_access_key_id=info.access_key_id,
        aws_secret_access_key=info.secret_access_key,
        config=Config(connect_timeout=3, read_timeout=10, retries={"total_max_attempts": 2}),
    )
    try:
        pages = client.get_paginator("list_microvms").paginate()
        return dict(Counter(item["state"] for page in pages for item in page["items"]))
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise LocalServiceTrouble(f"it does not answer: {error}") from error
    finally:
        client.close()


__all__ = ["EnvLocal", "FaultsLocal", "LocalApp", "StartLocal", "StatusLocal", "StopLocal"]
