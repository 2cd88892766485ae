"""The words of a link core: its role and phase, what it tells, and a record of its state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kernel_guest.shared.errors import LinkRefused
from kernel_guest.shared.messages import LinkMessage


class Role(Enum):
    """Which side a core plays."""

    GUEST = "guest"
    GATEWAY = "gateway"


class Phase(Enum):
    """Where the present transport is."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Greeting:
    """A handshake in progress on one socket of the guest; `frame` is its CHALLENGE."""

    frame: bytes
    nonce: str


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake passed.

    `resumed`: the stream goes on, nothing is lost.  Otherwise it is a new stream, and for a
    gateway that had one before (`restarted`) the guest is another one: `in_flight` messages may
    or may not have been received, `unsent` ones never left.  Both are given back, not sent again.
    """

    resumed: bool
    boot_id: str
    restarted: bool = False
    in_flight: tuple[LinkMessage, ...] = ()
    unsent: tuple[LinkMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    """A message has arrived; call `consumed(message.size_bytes, message.lane)` when drained."""

    message: LinkMessage


@dataclass(frozen=True, slots=True)
class Refused:
    """The handshake failed.  Send what `take_frames` still gives, then close."""

    code: str
    text: str

    def error(self) -> LinkRefused:
        """As an exception."""
        return LinkRefused(self.code, self.text)


LinkEvent = Established | Received | Refused


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """One lane of a core.  Bytes of queued, unacked and window are costs (see `credit`)."""

    queued_messages: int
    queued_bytes: int
    unacked_bytes: int
    window_bytes: int
    accepted_messages: int
    delivered_messages: int
    resent_frames: int
    received_messages: int
    unconsumed_bytes: int
    unfinished_bytes: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """A core at one moment, for status pages and tests."""

    role: str
    phase: str
    stream: int
    resumes: int
    fresh_attachments: int
    protocol_errors: int
    stray_frames: int
    urgent: LaneStatistics
    ordered: LaneStatistics
