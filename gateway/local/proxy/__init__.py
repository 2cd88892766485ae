"""The data plane of a machine: LM 4 and 5 as a listener on 127.0.0.1."""

from gateway.local.proxy.server import MachineProxy

__all__ = ["MachineProxy"]
