"""Serves a fixed list of operations and prints a hash of every move plan: one rank of several.

Run as a script: `replica.py MAX_SLEEP_S`; one line for each form of the free list.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time

import numpy as np

from kvdefrag.core.policy import Gather, Lower
from tests.machine.engine import Engine, Shape, settings_for

MODES = ("tenure", "evacuation", "gather", "lower")


def plans_of(form: str, max_sleep_s: float) -> str:
    """Return how many rows moved, and a hash of all plans and of the final free list."""
    draw = np.random.default_rng(5)
    engine = Engine(Shape(size=301, rows=8, width=96, device_form=form == "device", delay=2))
    for turn in range(40):
        if len(engine.free_rows()) > 2:
            shared = list(range(1000, 1000 + int(draw.integers(0, 30))))
            engine.admit([shared + engine.fresh_tokens(int(draw.integers(1, 20)))])
        rows = [r for r, q in engine.requests.items() if q.committed < 90]
        for row in sorted(rows):
            if draw.random() < 0.7 and not engine.decode([row]):
                engine.finish(row, keep=False)
        if draw.random() < 0.3 and engine.requests:
            engine.finish(int(draw.choice(sorted(engine.requests))), keep=turn % 2 == 0)
        compact(engine, MODES[turn % len(MODES)])
        # Ranks are never equally fast.
        time.sleep(random.random() * max_sleep_s)
    engine.check()
    plans = [(p.src.tolist(), p.dst.tolist()) for p in engine.mover.plans]
    moved = sum(int(p.moved_rows()) for p in engine.mover.plans)
    words = repr((plans, engine.allocator.free_slots().tolist()))
    return f"{moved} {hashlib.sha256(words.encode()).hexdigest()}"


def compact(engine: Engine, mode: str) -> None:
    config = settings_for(mode, bytes_per_step=1 << 16, dry_run=False, max_live=32)
    engine.defragmenter.configure(engine.paged(config))
    if mode == "gather" and engine.requests:
        row = min(engine.requests)
        engine.defragmenter.request(Gather(row, int(engine.generation[row])))
    elif mode == "lower":
        engine.defragmenter.request(Lower(16))
    for _ in range(3):
        engine.compact()


if __name__ == "__main__":
    for form in ("host", "device"):
        print(plans_of(form, float(sys.argv[1])))
