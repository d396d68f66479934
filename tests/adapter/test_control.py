"""Commands to a live scheduler: what they do, and that the tokens stay those of stock."""

from __future__ import annotations

from typing import Any

import pytest
from harness.jobs import COMMANDED_CASES

CASES = pytest.mark.parametrize("case", COMMANDED_CASES)


def commands(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the commands that a task was told, by their id."""
    return {command["id"]: command for command in found["control"]["commands"]}


def moved(found: dict[str, Any], first: int, last: int) -> int:
    """Return the rows that moved in steps `first` to `last`."""
    return sum(t["moved"] for t in found["trace"] if first <= t["step"] <= last)


@CASES
@pytest.mark.children("stock", "commanded")
def test_the_tokens_are_those_of_stock_whatever_is_asked(children: Any, case: str) -> None:
    stock = children.served("stock", case)

    for kind in ("compactions", "steering"):
        found = children.served("commanded", f"{case}, {kind}")
        assert found["outputs"] == stock["outputs"]
        assert found["left"] == 0
        assert found["state"]["error"] is None


@CASES
@pytest.mark.children("commanded")
def test_a_dry_run_moves_nothing_and_tells_the_effect(children: Any, case: str) -> None:
    found = children.served("commanded", f"{case}, compactions")
    dry = [c for c in commands(found).values() if c.get("dry_run")]

    assert len(dry) == 4
    assert moved(found, 0, commands(found)["at-30"]["came_at"] - 1) == 0
    for command in dry:
        assert command["status"] == "done", command
        assert command["before"]["tokens"] == command["after"]["tokens"] > 0
        assert command["bytes"] == command["rows"] * found["state"]["row_bytes"]
        if command["rows"] == 0:
            assert command["before"] == command["after"]
    (tenure,) = [c for c in dry if c["how"] == "tenure"]
    if tenure["rows"]:
        assert tenure["after"]["coverage"] > tenure["before"]["coverage"]


@CASES
@pytest.mark.children("commanded")
def test_compactions_move_what_they_say(children: Any, case: str) -> None:
    found = children.served("commanded", f"{case}, compactions")
    told = [c for c in commands(found).values() if c["status"] == "done" and not c["dry_run"]]

    assert {c["how"] for c in told} >= {"tenure", "evacuate", "lower"}
    assert sum(c["rows"] for c in told) == found["moved"] == found["state"]["moved_rows"]
    assert commands(found)["at-50"]["rows"] <= 40
    assert commands(found)["at-65"]["said"] == "request nobody: does not run now"
    assert all(not t["moved"] for t in found["trace"] if "a compaction" not in str(t["gates"]))


@pytest.mark.children("commanded")
def test_a_compaction_moves_rows(children: Any) -> None:
    found = children.served("commanded", "llama-retract, compactions")

    assert commands(found)["at-30"]["rows"] > 16
    assert commands(found)["at-30"]["slices"] >= 1
    assert commands(found)["at-60"]["rows"] > 0


@CASES
@pytest.mark.children("commanded")
def test_a_pause_stops_all_moves_until_it_is_resumed(children: Any, case: str) -> None:
    found = children.served("commanded", f"{case}, steering")
    told = commands(found)
    first, last = told["at-36"]["active_from"], told["at-56"]["active_from"]

    assert last - first >= 15
    assert moved(found, first, last - 1) == 0
    assert {tuple(t["gates"]) for t in found["trace"] if first <= t["step"] < last} == {("paused",)}
    assert told["at-46"]["said"] == "paused: resume first"
    assert told["at-47"]["status"] == "done"
    assert found["control"]["paused"] is False


@pytest.mark.children("commanded")
def test_rows_move_before_a_pause_and_behind_it(children: Any) -> None:
    found = children.served("commanded", "llama-retract, steering")
    told = commands(found)

    assert moved(found, 0, told["at-36"]["active_from"] - 1) > 0
    assert moved(found, told["at-56"]["active_from"], told["at-76"]["active_from"] - 1) > 0


@CASES
@pytest.mark.children("commanded")
def test_a_reload_is_active_from_the_step_that_was_told(children: Any, case: str) -> None:
    found = children.served("commanded", f"{case}, steering")
    told = commands(found)["at-76"]

    assert told["active_from"] == told["came_at"] + 7
    modes = {t["step"]: t["mode"] for t in found["trace"]}
    assert modes[told["active_from"] - 1] == "threshold"
    assert modes[told["active_from"]] == "off"
    assert moved(found, told["active_from"], 1 << 30) == 0


@CASES
@pytest.mark.children("commanded")
def test_a_bad_command_changes_nothing_and_is_named(children: Any, case: str) -> None:
    found = children.served("commanded", f"{case}, steering")
    told = commands(found)

    assert told["at-66"]["status"] == told["at-67"]["status"] == "refused"
    assert told["at-66"]["said"].startswith("relocation.tenure_interval: 0 is not allowed")
    assert told["at-67"]["said"] == "placement.free_list: cannot change while the server runs"
    assert "at-68" not in told
    assert found["taken"] == [True, True, True, True, False, False, False, True]
    assert {t["mode"] for t in found["trace"] if t["step"] < told["at-76"]["active_from"]} == {
        "threshold"
    }


@pytest.mark.children("stock", "commanded")
@pytest.mark.parametrize("kind", ["recording", "recording of moves"])
def test_a_recording_that_begins_on_a_pool_in_use_can_be_replayed(children: Any, kind: str) -> None:
    found = children.served("commanded", kind)
    (told,) = commands(found).values()
    (log,) = found["logs"]

    assert found["outputs"] == children.served("stock", "llama-retract-overlap")["outputs"]
    assert (told["status"], told["dropped"], log["cut"]) == ("done", 0, None)
    assert log["kinds"]["Opened"] == 1
    assert log["kinds"]["Step"] == told["steps"] > 5
    assert log["kinds"].get("Moved", 0) > 0 or kind == "recording"
    assert log["coverage"]["placement+reservation"] >= log["coverage"]["stock"]
    assert log["coverage"]["placement+reservation"] > 0


def test_a_message_of_sglangs_own_is_passed_on() -> None:
    from types import SimpleNamespace

    from kvdefrag.sglang.control import around_set_internal_state

    seen: list[Any] = []

    def original(scheduler: Any, message: Any) -> str:
        seen.append(message)
        return "theirs"

    without = SimpleNamespace(kvdefrag=SimpleNamespace(control=None))
    ours = SimpleNamespace(server_args={"kvdefrag": 1}, rid="{}")
    plain = SimpleNamespace(server_args={"pp_max_micro_batch_size": 8}, rid=None)
    with_control = SimpleNamespace(kvdefrag=SimpleNamespace(control=object()))
    assert around_set_internal_state(original, without, ours) == "theirs"
    assert around_set_internal_state(original, SimpleNamespace(), ours) == "theirs"
    assert around_set_internal_state(original, with_control, plain) == "theirs"
    assert len(seen) == 3


def control(**attachment: Any) -> Any:
    """Return the control of an attachment that takes no steps."""
    from types import SimpleNamespace

    from kvdefrag.config import Config
    from kvdefrag.sglang.control import Control

    fields = {"config": Config(), "steps": 5, "error": None, "due": None} | attachment
    return Control(SimpleNamespace(**fields), None)


def test_a_command_that_comes_twice_is_served_once() -> None:
    made = control()

    assert made.receive('{"id": "a", "action": "pause"}')
    assert not made.receive('{"id": "a", "action": "resume"}')
    (shown,) = made.state()["commands"]
    assert (shown["action"], shown["status"], shown["came_at"]) == ("pause", "waiting", 5)


def test_commands_do_not_pile_up_and_the_latest_outcomes_are_kept() -> None:
    made = control()
    taken = [made.receive(f'{{"id": "a{i}", "action": "pause"}}') for i in range(40)]

    assert taken == [True] * 16 + [False] * 24
    assert [c["id"] for c in made.state()["commands"]] == [f"a{i}" for i in range(8, 40)]
    assert made.state()["commands"][-1]["said"] == "16 commands wait already"


def test_nothing_is_served_after_a_fault() -> None:
    made = control(error="ZeroDivisionError: x")
    waiting = control()
    waiting.receive('{"id": "a", "action": "pause"}')
    waiting.fault(ZeroDivisionError("x"))

    assert not made.receive('{"id": "a", "action": "pause"}')
    assert "has stopped after a fault" in made.state()["commands"][0]["said"]
    (shown,) = waiting.state()["commands"]
    assert (shown["status"], shown["said"]) == ("failed", "ZeroDivisionError: x")


@pytest.mark.parametrize("moves", [False, True])
def test_a_fault_of_work_that_moves_nothing_leaves_relocation_on(moves: bool) -> None:
    from types import SimpleNamespace

    made = control(defragmenter=SimpleNamespace(step=lambda *a, **k: "report"), _look=None)
    made._attachment._gates = tuple
    stopped: list[bool] = []
    made._work = SimpleNamespace(
        name="a", moves=moves, advance=lambda: 1 / 0, stop=lambda: stopped.append(True)
    )
    if moves:
        with pytest.raises(ZeroDivisionError):
            made.step()
        return
    assert made.step() == "report"
    assert (made._work, made._attachment.due, stopped) == (None, None, [True])


class Busywork:
    """Work that goes on until it is stopped, and notes the steps it was asked for."""

    def __init__(self, steps: Any, *, moves: bool) -> None:
        self.name, self.moves, self._steps = "work", moves, steps
        self.asked: list[int] = []

    def advance(self) -> bool:
        self.asked.append(self._steps())
        return False

    def forbidden(self, config: Any) -> str:
        return "kill_switch: it is on, and nothing may move" if config.kill_switch else ""

    def stop(self) -> None:
        pass


def stepping(**attachment: Any) -> Any:
    """Return the control of an attachment whose steps do nothing else."""
    from types import SimpleNamespace

    made = control(
        defragmenter=SimpleNamespace(step=lambda *a, **k: "report"),
        _look=None,
        steps=0,
        **attachment,
    )
    there = made._attachment
    there._gates, there.recording = tuple, None
    there.configure = lambda config: setattr(there, "config", config)
    return made


def turn(made: Any, *commands: str) -> None:
    for command in commands:
        assert made.receive(command)
    made.step()
    made._attachment.steps += 1


def test_a_compaction_under_way_stands_still_while_paused_and_ends_with_the_kill_switch() -> None:
    made = stepping()
    work = made._work = Busywork(lambda: made._attachment.steps, moves=True)

    turn(made)
    turn(made, '{"id": "p", "action": "pause"}')
    turn(made)
    turn(made, '{"id": "r", "action": "resume"}')
    turn(made, '{"id": "k", "action": "reload", "settings": {"kill_switch": true}}')
    turn(made)

    assert work.asked == [0, 3]
    assert made._work is None


def test_a_recording_which_a_clock_ends_keeps_no_compaction_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvdefrag.sglang import control as module

    begun: dict[str, list[int]] = {}
    for rank, records in (("records", True), ("does not", False)):
        made = stepping()
        if records:
            made._log = Busywork(lambda: 0, moves=False)
        compaction = Busywork(lambda made=made: made._attachment.steps, moves=True)
        monkeypatch.setattr(module, "Asked", lambda *a, compaction=compaction: compaction)
        for step in range(4):
            turn(made, *(['{"id": "c", "action": "compact", "how": "lower"}'] if step == 1 else []))
        begun[rank] = compaction.asked

    assert begun["records"] == begun["does not"] == [1, 2, 3]
