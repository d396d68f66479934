"""What a reload may change."""

from __future__ import annotations

import pytest

from kvdefrag.config import Config
from kvdefrag.control.update import updated
from kvdefrag.errors import ConfigError

START = Config(page=32, relocation={"mode": "threshold"})  # type: ignore[arg-type]


def test_what_is_named_changes_and_the_rest_stays_as_it_was_at_the_start() -> None:
    found = updated(START, {"relocation": {"bytes_per_step": "2MiB"}, "kill_switch": True})

    assert (found.page, found.relocation.mode) == (32, "threshold")
    assert (found.relocation.bytes_per_step, found.kill_switch) == (2 << 20, True)
    assert updated(found, {"consumers": [{"kind": "tail"}]}).consumers[0].kind == "tail"
    assert updated(START, {}) == START
    assert START.relocation.bytes_per_step == 64 << 20


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"relocation": {"tenure_interval": 0}}, "relocation.tenure_interval: 0 is not allowed"),
        ({"relocation": {"mod": "off"}}, "did you mean relocation.mode?"),
        ({"nonsense": 1}, "nonsense: unknown key"),
        ({"relocation": 3}, "relocation: "),
        ({"page": 64}, "page: cannot change while the server runs"),
        ({"placement": {"free_list": "fifo"}}, "placement.free_list: cannot change"),
        ({"relocation": {"readback_steps": 5}}, "relocation.readback_steps: cannot change"),
        ({"control": {"enabled": True}}, "control.enabled: cannot change"),
    ],
)
def test_what_is_refused_is_named_by_its_key(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        updated(START, settings)
    assert said in str(caught.value)
