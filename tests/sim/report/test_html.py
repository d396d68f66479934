from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from kvdefrag.errors import ConfigError
from kvdefrag.sim.metrics import METRICS
from kvdefrag.sim.report import html, payload

EVIL = '</script><script>alert(1)</script><b onclick="x">\'{{script}}'


class Page(HTMLParser):
    """Collects elements, what they refer to, and the text of scripts by id."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.scripts, self.text = [], [], {}, []
        self.open = None

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.links += [values[k] for k in ("src", "href", "srcset", "action") if k in values]
        if tag == "script":
            self.open = values.get("id", "code")

    def handle_endtag(self, tag):
        self.open = None if tag == "script" else self.open

    def handle_data(self, data):
        if self.open:
            self.scripts[self.open] = self.scripts.get(self.open, "") + data
        else:
            self.text.append(data)


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    """Stand in for the library, whose compression alone takes a second."""
    monkeypatch.setattr(html, "_plotly", lambda: "window.Plotly = {}")


def parse(result):
    page = Page()
    page.feed(html.render(result))
    return page


def unpack(text):
    return zlib.decompress(base64.b64decode(text))


def test_the_file_refers_to_nothing_outside_itself(make_result):
    page = parse(make_result())
    assert page.links == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", html.render(make_result()))
    assert list(page.scripts) == ["data", "maps", "plotly", "code"]


def test_tables_verdict_options_and_definitions_stand_without_scripts(make_result):
    text = " ".join(parse(make_result()).text)
    for expected in (
        "Sorting adds something.",
        "The pool was nearly empty.",
        "placement+reservation",
        "40.80",
        "ab" * 32,
        "pool_slots",
        "3.11.7",
        *(metric.definition for metric in METRICS),
    ):
        assert expected in text


def test_strings_of_the_user_cannot_become_markup(make_result):
    result = make_result()
    arm = dataclasses.replace(result.arms[0], name=EVIL, description=EVIL)
    result = dataclasses.replace(
        result,
        arms=(arm,),
        trace={"name": EVIL, "sha256": EVIL, EVIL: 1},
        options={EVIL: EVIL},
        versions={EVIL: EVIL},
        verdict=(EVIL,),
        warnings=(EVIL,),
    )
    page, clean = parse(result), parse(make_result())
    assert page.tags.count("script") == clean.tags.count("script")
    assert set(page.tags) <= set(clean.tags)
    assert json.loads(page.scripts["data"])["arms"][0]["name"] == EVIL
    assert page.scripts["code"] == clean.scripts["code"]


def test_maps_come_back_as_they_were_packed(make_result):
    result = make_result(maps=3, cells=100)
    arm = result.arms[0]
    arm.maps[1].owners[:3] = [0, 255, 65535]
    described = payload.describe(result)["arms"][0]["maps"]
    data = np.frombuffer(unpack(payload.pack(payload.map_bytes(result))), np.uint8)
    before = np.zeros(200, np.uint8)
    for index, (pool_map, entry) in enumerate(zip(arm.maps, described, strict=True)):
        before = data[200 * index : 200 * (index + 1)] ^ before
        owners = before[:100].astype(np.uint16) | before[100:].astype(np.uint16) << 8
        assert owners.tolist() == pool_map.owners.tolist()
        assert entry == {"cells": 100, "slots_per_cell": 64, "time_s": pool_map.time_s}
    assert len(data) == 8 * 3 * 200


def test_a_map_of_another_size_starts_afresh(make_result):
    wide, small = make_result(maps=1, cells=64), make_result(maps=1, cells=32)
    maps = (wide.arms[0].maps[0], small.arms[0].maps[0])
    arm = dataclasses.replace(wide.arms[0], maps=maps)
    data = payload.map_bytes(dataclasses.replace(wide, arms=(arm,)))
    assert list(data[128:160]) == (maps[1].owners & 0xFF).tolist()


def test_long_series_are_thinned_and_keep_both_ends(make_result):
    result = make_result(samples=3000)
    described = payload.describe(result)["arms"][0]
    assert described["samples"] == 3000
    assert {len(values) for values in described["series"].values()} == {payload.POINTS}
    assert described["series"]["step"][0] == 0
    assert described["series"]["step"][-1] == 2999


def test_not_a_number_is_null_in_the_data(make_result):
    result = make_result(samples=3)
    result.arms[0].series["coverage"][1] = np.nan
    series = payload.describe(result)["arms"][0]["series"]
    assert series["coverage"][1] is None


def test_24_large_maps_of_the_most_scattered_arm_stay_small(make_result):
    result = make_result(maps=24, cells=16_384, samples=10)
    alone = dataclasses.replace(result, arms=result.arms[:1])
    # Eight such arms and 2 MB of compressed plotly.js stay under 8 MB.
    assert len(html.render(alone)) < 0.75e6


def test_arms_without_maps_and_samples_are_drawn(make_result, make_arm):
    page = parse(dataclasses.replace(make_result(), arms=(make_arm("stock"),)))
    assert json.loads(page.scripts["data"])["arms"][0]["maps"] == []
    assert unpack(page.scripts["maps"]) == b""


def test_equal_results_give_equal_files(make_result, tmp_path):
    html.write_html(make_result(), tmp_path / "a.html")
    html.write_html(make_result(), tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_missing_plotly_is_named_with_the_way_to_get_it(make_result, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvdefrag\[report\]'"):
        html.render(make_result())


def test_the_real_library_is_embedded(monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.undo()
    text = html._plotly()
    assert "plotly.js v" in text[:200]
    assert len(text) > 1e6
