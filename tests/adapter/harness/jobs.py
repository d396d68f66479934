"""Which child does what: name of the child, whether the plugin is on, and its tasks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from harness.cases import CASES, Case
from harness.injections import POINTS
from harness.pages import PAGE, transcripts

LONG = os.environ.get("KVDEFRAG_ADAPTER_LONG") == "1"


def _installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


VERSION = _installed()


@dataclass(frozen=True)
class Job:
    """What one child process does.

    Attributes:
        tasks: By key; see `harness.tasks`.
        plugin: Whether the plugin is enabled.
        variables: Added to its environment.
    """

    tasks: dict[str, dict[str, Any]]
    plugin: bool = True
    variables: dict[str, str] = field(default_factory=dict)


def cases() -> list[Case]:
    """Return the cases of this run."""
    return [case for case in CASES if LONG or not case.long]


def _serve(names: list[str], **more: Any) -> dict[str, dict[str, Any]]:
    return {name: {"kind": "serve", "case": name} | more for name in names}


def _chaos(names: list[str], first: int, page: int) -> dict[str, dict[str, Any]]:
    # Each case has its own seed; every second one keeps the rest of a page in reserve.
    found = {}
    for seed, name in enumerate(names, first):
        settings = {"page": page, "placement": {"reservation": seed % 2 == 0}}
        found[name] = {"kind": "serve", "case": name, "chaos": seed, "settings": settings}
    return found


# The policy as it is, and pages of 64: fewer cases, every feature once.
SOME = [
    "llama-overlap",
    "llama-chunked-overlap-small-abort",
    "llama-retract-overlap",
    "llama-flush",
    "llama-sessions",
    "mla-no-tree",
    "mla-overlap-chunked-small-abort",
    "eagle-topk-4-overlap-chunked",
    "standalone-topk-2",
]
LOCKSTEPS = [
    (discipline, overlap, pool)
    for discipline in ("fifo", "sorted", "two_ended")
    for overlap, pool in ((False, 420), (True, 700))
]
# Plant, case, whether our own checks look on, and what is said then; None: the output changes.
OVERSIGHTS: list[tuple[str, str, bool, str | None]] = [
    ("a buffer is left out", "llama-chunked", True, "our step changed buffer 3"),
    ("a buffer is left out", "eagle-topk-4-overlap-chunked", True, "our step changed buffer 5"),
    ("a buffer is left out", "llama-chunked", False, None),
    ("two rows are exchanged", "llama-chunked", True, "our step changed buffer 0"),
    ("two rows are exchanged", "llama-chunked", False, None),
    ("the rows are left out", "llama-chunked", True, "slots nobody holds"),
    ("the rows are left out", "llama-chunked", False, "KV page use-after-free"),
    ("the tree is left out", "llama-chunked", True, "held twice"),
    ("the tree is left out", "eagle-topk-4-overlap-chunked", False, "KV page use-after-free"),
    ("the table is replaced", "llama-chunked", True, "slots nobody holds"),
    ("the substitution is left out", "llama-chunked", True, "slots nobody holds"),
    ("the substitution is left out", "llama-chunked", False, "KV page use-after-free"),
    ("a row is spoilt", "llama-chunked", True, "does not hold its token"),
    ("a slot is lost", "llama-chunked", False, "Full Pool Mem Leak"),
    ("a slot is free twice", "llama-chunked", False, "KV double free"),
    ("a tree node is spoilt", "llama-chunked", True, "slot"),
]
ONLY_OLD = [("the prefix indices are left out", "llama-chunked", True, "prefix indices")]
ONLY_NEW = [("a tree lock is spoilt", "llama-python-core", True, "lock_ref")]


IDLE = ["llama-sessions", "llama-sessions-overlap"]
RECORDED = ["llama-chunked", "llama-retract-overlap", "llama-flush", "mla-no-tree"]
RECORDED_SPECULATION = ["eagle-topk-4-overlap-chunked"]


def _idle(name: str) -> dict[str, Any]:
    # Nothing but the packing of an idle engine may move a row.
    mechanisms = {"tenure": False, "evacuation": False, "on_demand": True}
    relocation = {"mechanisms": mechanisms, "tenure_interval": 1, "backoff_max_shift": 0}
    settings = {"relocation": relocation, "placement": {"reservation": False}}
    return {"kind": "serve", "case": name, "settings": settings}


# What stands in the way, and what is said then.
REFUSED = {
    "captured": "--enable-return-indexer-topk: captured indexer choices are kept by slot",
    "settings": "ConfigError: placement.reservation: true needs ",
}


def _refused() -> dict[str, dict[str, Any]]:
    shared = {"kind": "refuse", "case": "llama-chunked"}
    return {
        "captured": shared | {"options": {"enable_return_indexer_topk": True}},
        "settings": shared | {"settings": {"placement": {"free_list": "fifo"}}},
    }


def _recorded() -> dict[str, dict[str, Any]]:
    off = {"relocation": {"mode": "off"}}
    found: dict[str, dict[str, Any]] = {
        name: {"kind": "record", "case": name, "settings": off}
        for name in (*RECORDED, *RECORDED_SPECULATION)
    }
    found["moves"] = {"kind": "record", "case": "llama-retract", "chaos": 21}
    return found


# Nothing moves but what is asked for, and decode leaves much to be moved.
ASKED = {
    "relocation": {"mode": "on_demand", "bytes_per_step": "64KiB"},
    "placement": {"reservation": False},
}
COMPACTIONS: list[tuple[int, dict[str, Any]]] = [
    (20, {"action": "compact", "dry_run": True}),
    (21, {"action": "compact", "how": "evacuate", "dry_run": True}),
    (22, {"action": "compact", "how": "lower", "dry_run": True}),
    (23, {"action": "compact", "how": "gather", "request": "any", "dry_run": True}),
    (30, {"action": "compact"}),
    (40, {"action": "compact", "how": "evacuate"}),
    (50, {"action": "compact", "how": "lower", "rows": 40}),
    (60, {"action": "compact", "how": "gather", "request": "any"}),
    (65, {"action": "compact", "how": "gather", "request": "nobody"}),
]
STEERING: list[tuple[int, dict[str, Any]]] = [
    (36, {"action": "pause"}),
    (46, {"action": "compact"}),
    (47, {"action": "compact", "dry_run": True}),
    (56, {"action": "resume"}),
    (66, {"action": "reload", "settings": {"relocation": {"tenure_interval": 0}}}),
    (67, {"action": "reload", "settings": {"placement": {"free_list": "fifo"}}}),
    (68, {"action": "explode"}),
    (76, {"action": "reload", "settings": {"relocation": {"mode": "off"}}, "after_steps": 7}),
]
RECORDING: list[tuple[int, dict[str, Any]]] = [(25, {"action": "record", "seconds": 0.5})]
COMMANDED_CASES = ["llama-retract", "llama-retract-overlap", "mla-retract-overlap"]


def _commanded() -> dict[str, dict[str, Any]]:
    threshold = {"relocation": {"mode": "threshold", "tenure_interval": 1, "backoff_max_shift": 0}}
    moving = threshold | {"placement": {"reservation": False}}
    found: dict[str, dict[str, Any]] = {}
    for case in COMMANDED_CASES:
        shared = {"kind": "command", "case": case}
        found[f"{case}, compactions"] = shared | {"settings": ASKED, "script": COMPACTIONS}
        found[f"{case}, steering"] = shared | {"settings": moving, "script": STEERING}
    shared = {"kind": "command", "case": "llama-retract-overlap", "script": RECORDING}
    found["recording"] = shared | {"settings": ASKED}
    found["recording of moves"] = shared | {"settings": moving}
    return found


# A server in which there is something to be moved, and nothing moves by itself.
OPERATED = {
    "KVDEFRAG_CONTROL__ENABLED": "true",
    "KVDEFRAG_PLACEMENT__RESERVATION": "false",
    "KVDEFRAG_RELOCATION__MODE": "on_demand",
    "KVDEFRAG_OBSERVE__LOG_INTERVAL": "5",
}


def documented_commands() -> list[str]:
    """Return the commands on the page on operation that a live server is needed for."""
    return [command for command, _ in transcripts(PAGE.read_text(encoding="utf-8"), "server")]


def oversights() -> list[tuple[str, str, bool, str | None]]:
    """Return the plants that this version is tried with."""
    return OVERSIGHTS + (ONLY_OLD if VERSION == "0.5.17" else ONLY_NEW)


def key_of(plant: str, case: str, watched: bool) -> str:
    """Return the key of a planted fault's task."""
    return f"{plant}, {case}, {'watched' if watched else 'not watched'}"


def lockstep_key(discipline: str, overlap: bool, pool: int) -> str:
    """Return the key of a run beside the simulator."""
    return f"{discipline}, {'overlap' if overlap else 'no overlap'}, {pool} slots"


def case_of(point: str) -> str:
    """Return the case in which a point raises: tenure needs long outputs, copies need chunks."""
    tenure = point in ("substitute pages", "confirm", "planner of tenure")
    return "llama-retract" if tenure else "llama-chunked"


def jobs() -> dict[str, Job]:
    """Return every child, those that take longest first."""
    names = [case.name for case in cases()]
    replicas = _chaos(["llama-retract-overlap", "eagle-topk-4"], 40, 16)
    slow = {key: task | {"dawdle": 0.02} for key, task in replicas.items()}
    planted = {
        key_of(plant, case, watched): {
            "kind": "plant",
            "plant": plant,
            "case": case,
            "watched": watched,
            "chaos": 5,
        }
        for plant, case, watched, _ in oversights()
    }
    injected = {
        point: {"kind": "inject", "point": point, "case": case_of(point), "chaos": 6}
        for point in POINTS
    }
    found = {
        "chaos": Job(_chaos(names, 0, 16)),
        "stock": Job(_serve(names), plugin=False),
        "chaos in pages of 64": Job(_chaos(names if LONG else SOME, 101, 64)),
        "on": Job(_serve(names if LONG else SOME)),
        "planted": Job(planted),
        "injected": Job(injected),
        "first replica": Job(replicas, variables={"PYTHONHASHSEED": "1"}),
        "second replica": Job(slow, variables={"PYTHONHASHSEED": "2"}),
        "engine": Job(
            {"engine": {"kind": "engine"}}, variables={"KVDEFRAG_OBSERVE__LOG_INTERVAL": "5"}
        ),
        "idle": Job({name: _idle(name) for name in IDLE}),
        "recorded": Job(_recorded()),
        "refused": Job(_refused()),
        "operated": Job(
            {"documented": {"kind": "operate", "commands": documented_commands()}},
            variables=OPERATED,
        ),
        "commanded": Job(_commanded(), variables={"KVDEFRAG_CONTROL__ENABLED": "true"}),
        "lockstep": Job(
            {
                lockstep_key(discipline, overlap, pool): {
                    "kind": "lockstep",
                    "discipline": discipline,
                    "reservation": False,
                    "overlap": overlap,
                    "pool": pool,
                }
                for discipline, overlap, pool in LOCKSTEPS
            }
        ),
    }
    return found
