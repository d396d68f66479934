from __future__ import annotations

import dataclasses
import json
import math

from kvdefrag.sim.report.chrome_trace import write_chrome_trace


def written(result, path):
    write_chrome_trace(result, path)
    return json.loads(path.read_text())


def test_every_arm_is_a_process_with_its_steps(make_result, tmp_path):
    result = make_result(steps=3)
    events = written(result, tmp_path / "t.json")["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {i: arm.name for i, arm in enumerate(result.arms, start=1)}
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["ts"], e["dur"]) for e in steps] == [(0.0, 4e3), (5e3, 4e3), (10e3, 4e3)]
    assert steps[0]["args"] == {"batch": 64.0}
    assert steps[0]["name"] == "decode"


def test_counters_carry_layout_and_pool_use_in_microseconds(make_result, tmp_path):
    result = make_result(samples=5)
    events = written(result, tmp_path / "t.json")["traceEvents"]
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2]
    layout = [e for e in counters if e["name"] == "layout"]
    series = result.arms[1].series
    assert [e["ts"] for e in layout] == [t * 1e6 for t in series["time_s"].tolist()]
    assert [e["args"]["coverage"] for e in layout] == series["coverage"].tolist()
    pool = next(e for e in counters if e["name"] == "pool")
    assert set(pool["args"]) == {"live_share", "cached_share", "reserved_share"}


def test_what_is_not_finite_is_left_out(make_result, tmp_path):
    result = make_result(samples=2)
    arm = result.arms[0]
    arm.series["coverage"][:] = math.nan
    arm.series["moved_rows"][:] = math.nan
    events = written(dataclasses.replace(result, arms=(arm,)), tmp_path / "t.json")["traceEvents"]
    counters = [e for e in events if e["ph"] == "C"]
    assert all("coverage" not in e["args"] for e in counters)
    assert all(e["name"] != "moved rows" for e in counters)


def test_a_result_without_arms_is_still_a_trace(make_result, tmp_path):
    document = written(dataclasses.replace(make_result(), arms=()), tmp_path / "t.json")
    assert document["traceEvents"] == []
    assert document["otherData"]["sha256"] == "ab" * 32
