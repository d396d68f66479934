"""Ranks that do the same in the same order plan the same moves, whatever else differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPLICA = ROOT / "tests" / "machine" / "replica.py"


def rank(*, hash_seed: str, threads: str, max_sleep_s: str) -> list[str]:
    own = {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(REPLICA), max_sleep_s],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_case_63_ranks_with_other_hash_seeds_threads_and_clocks_plan_the_same_moves() -> None:
    one = rank(hash_seed="0", threads="1", max_sleep_s="0")
    other = rank(hash_seed="1", threads="2", max_sleep_s="0.005")
    assert len(one) == 2
    assert all(int(line.split()[0]) > 100 for line in one)
    assert one == other
