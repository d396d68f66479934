"""The table names its sources, and the choice follows it and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from kvdefrag.attention import Kind, Task, default_crossover, load_crossover, ranked
from kvdefrag.errors import ConfigError
from kvdefrag_kernels.attention_geometry import Geometry

MLA, GQA = Geometry(16, 1, 576, 512, True), Geometry(32, 8, 128, 128)
BOTH = ("flashmla_sparse", "kernel")
ALL = (*BOTH, "kernel_pages", "stock")


def task(kind=Kind.CHAIN, geometry=MLA, requests=1, queries=9, kv=torch.bfloat16):
    return Task(kind, geometry, requests, queries, kv)


def table(*entries, margin=0.0):
    return json.dumps({"version": 1, "machine": "none", "margin": margin, "entries": entries})


def entry(length, **us):
    return {
        "kind": "verify", "heads": 16, "kv_heads": 1, "k_dim": 576, "latent": True,
        "kv": "bfloat16", "requests": 1, "queries": 9, "length": length, "coverage": 0.0,
        "us": us, "source": "made up",
    }  # fmt: skip


def test_every_shipped_entry_names_the_scene_its_figures_are_from():
    shipped = default_crossover()

    assert len(shipped.entries) >= 28
    for found in shipped.entries:
        name, _, scene = found.source.partition(": ")
        assert name.endswith(".json")
        assert scene
        assert found.us["kernel"] > 0
        assert found.us["stock"] > found.us["kernel"]


@pytest.mark.parametrize("requests", [1, 2, 16, 64])
@pytest.mark.parametrize("length", [None, 1_000, 131_072])
def test_our_kernel_decodes_on_the_machine_measured(requests, length):
    wanted = task(Kind.DECODE, requests=requests, queries=1)

    assert ranked(default_crossover(), wanted, BOTH, length=length)[0] == "kernel"


def test_many_queries_of_a_chain_go_to_the_sparse_kernel_on_the_machine_measured():
    wanted = task(requests=16, queries=64)

    assert ranked(default_crossover(), wanted, BOTH)[0] == "flashmla_sparse"
    assert ranked(default_crossover(), wanted, ("kernel",)) == ("kernel",)


@pytest.mark.parametrize(("length", "first"), [(8_192, "kernel"), (131_072, "kernel")])
def test_a_lead_within_the_margin_does_not_count(length, first):
    # 128 against 143 us at 131k: the figure leaves out the chain's own tokens.
    shipped = default_crossover().model_copy(update={"margin": 0.12})

    assert ranked(shipped, task(), BOTH, length=length)[0] == first


def test_stock_is_never_first_on_the_machine_measured():
    for geometry in (MLA, GQA):
        for kind, queries in ((Kind.DECODE, 1), (Kind.TREE, 64)):
            order = ranked(default_crossover(), task(kind, geometry, 16, queries), ALL)
            assert order.index("stock") > order.index("kernel")


def test_a_name_without_a_figure_comes_last():
    assert ranked(default_crossover(), task(geometry=GQA), BOTH)[-1] == "flashmla_sparse"


def test_nobody_who_is_not_offered_is_picked():
    assert ranked(default_crossover(), task(), ()) == ()
    assert ranked(default_crossover(), task(requests=16, queries=64), ("stock",)) == ("stock",)


def test_the_nearest_length_decides_where_it_is_known_and_their_sum_where_not(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(
        table(entry(1_000, kernel=1, flashmla_sparse=2), entry(64_000, kernel=9, flashmla_sparse=7))
    )
    measured = load_crossover(path)

    assert ranked(measured, task(), BOTH, length=900)[0] == "kernel"
    assert ranked(measured, task(), BOTH, length=100_000)[0] == "flashmla_sparse"
    assert ranked(measured, task(), BOTH)[0] == "flashmla_sparse"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (table(), "entries"),
        (table(entry(0, kernel=1)), "length"),
        (table(entry(1)), "us"),
        ("{", "JSON"),
        ('{"version": 2, "machine": "x", "entries": []}', "version"),
    ],
)
def test_a_wrong_table_is_refused_with_its_field(tmp_path, text, why):
    path = tmp_path / "table.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=why):
        load_crossover(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        load_crossover(tmp_path / "missing.json")
