"""What an engine is, in one place for those who write another one.

The interfaces themselves live in `gateway.local.interfaces`, beside everything
else that the rooms of the local service know of each other.
"""

from gateway.local.interfaces import (
    AGENT_PORT,
    HOOK_PORT,
    Engine,
    EngineError,
    HookSettings,
    ImageBuildError,
    ImageSpec,
    MachineSpec,
    RunningMachine,
)

__all__ = [
    "AGENT_PORT",
    "HOOK_PORT",
    "Engine",
    "EngineError",
    "HookSettings",
    "ImageBuildError",
    "ImageSpec",
    "MachineSpec",
    "RunningMachine",
]
