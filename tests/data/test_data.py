"""The files that ship with the package are what SOURCE.md says they are."""

from __future__ import annotations

import hashlib

import pytest

from kvdefrag.data import CONVERSATION_TRACE, EAGLE_MTBENCH, open_data


@pytest.mark.parametrize("name", [CONVERSATION_TRACE, EAGLE_MTBENCH])
def test_a_shipped_file_has_the_checksum_that_the_source_note_states(name: str) -> None:
    with open_data(name) as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    with open_data("SOURCE.md") as file:
        note = file.read().decode()

    assert f"{digest}  {name}" in note


@pytest.mark.parametrize("licence", ["LICENSE-mooncake", "LICENSE-eagle"])
def test_a_licence_ships_beside_the_data(licence: str) -> None:
    with open_data(licence) as file:
        text = file.read().decode()

    assert "Apache License" in text


def test_the_trace_ends_with_a_newline_after_1200_lines() -> None:
    with open_data(CONVERSATION_TRACE) as file:
        content = file.read()

    assert content.count(b"\n") == 1200
    assert content.endswith(b"]}\n")


def test_a_file_that_does_not_ship_is_not_found() -> None:
    with pytest.raises(FileNotFoundError):
        open_data("absent.csv")
