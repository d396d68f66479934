"""Commands survive their way as text, and wrong ones are named."""

from __future__ import annotations

import pytest

from kvdefrag.control.command import Command, decode
from kvdefrag.errors import ConfigError


def test_a_command_is_the_same_behind_its_way() -> None:
    sent = Command(id="a-1", action="reload", settings={"relocation": {"mode": "off"}})

    assert decode(sent.encode()) == sent


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "command: "),
        ("[1]", "command: "),
        ('{"id": "a", "action": "explode"}', "action: "),
        ('{"id": "../a", "action": "pause"}', "id: "),
        ('{"id": "a", "action": "compact", "rows": 0}', "rows: "),
        ('{"id": "a", "action": "compact", "how": "gather"}', "needs the id of a request"),
        ('{"id": "a", "action": "pause", "more": 1}', "more: "),
    ],
)
def test_a_wrong_command_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode(text)
