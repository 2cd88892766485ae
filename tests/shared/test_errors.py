"""The shared error tree and the one JSON error shape."""

from __future__ import annotations

import json

import pytest

from kernel_guest.shared import errors


def test_every_error_is_in_the_tree_and_has_a_code() -> None:
    made = [
        errors.LinkProtocolError(errors.Fault.BAD_FRAME, "short"),
        errors.LinkFull("ordered", 10, 9),
        errors.MessageRefused("bytes", 10, 9),
        errors.LinkRefused("stale_epoch", "a newer lease"),
        errors.PathRefused("../x", "leads outside"),
        errors.PayloadError("bad"),
        errors.ManifestError("bad"),
    ]
    assert all(isinstance(error, errors.SharedError) for error in made)
    assert [error.code for error in made] == [
        "bad_frame",
        "link_full",
        "message_refused",
        "stale_epoch",
        "path_refused",
        "bad_payload",
        "bad_manifest",
    ]


def test_sentences_are_made_of_facts() -> None:
    assert str(errors.LinkFull("ordered", 10, 9)) == "link queue ordered holds 10 of 9 bytes"
    assert str(errors.LinkProtocolError(errors.Fault.BAD_FRAME)) == "link protocol: bad_frame"
    text = str(errors.MessageRefused("parts", 70_000, 16_384))
    assert text == "message has 70000 parts, the link carries at most 16384"


def test_hostile_text_is_cut_and_escaped() -> None:
    assert len(str(errors.LinkRefused("x", "y" * 10_000))) < 600
    refused = errors.PathRefused("\x1b[31m" + "x" * 10_000, "control character")
    assert "\x1b" not in str(refused)
    assert len(str(refused)) < 200


def test_the_one_error_shape() -> None:
    body = json.loads(errors.encode_error("not_found", "no such thing"))
    assert body == {"error": {"code": "not_found", "message": "no such thing"}}
    assert len(errors.error_body("x", "y" * 10_000)["error"]["message"]) == errors.MAX_ERROR_TEXT


def test_a_protocol_error_is_caught_as_a_link_error() -> None:
    with pytest.raises(errors.LinkError):
        raise errors.LinkProtocolError(errors.Fault.TOO_LARGE)
