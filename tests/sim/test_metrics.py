from __future__ import annotations

import math

import pytest

from kvdefrag.sim import metrics
from kvdefrag.sim.metrics import METRICS

FIXED_NAMES = [
    "page_coverage_mean",
    "page_coverage_p10",
    "page_coverage_request_mean",
    "page_coverage_request_p10",
    "prefix_hit_rate",
    "reserved_share",
    "mean_run",
    "runs_per_4096",
    "decode_coverage",
    "whole_free_share",
    "utilization_mean",
    "live_utilization_mean",
    "cached_utilization_mean",
    "moved_rows_per_decoded_token",
    "bytes_moved",
    "relocation_time_share",
    "requests_finished",
    "requests_rejected",
    "retractions",
    "descriptors_per_request",
    "attention_us_stock",
    "attention_us_paged",
    "modelled_tokens_per_second",
    "modelled_tokens_per_second_paged",
    "peak_utilization",
    "largest_free_run",
    "steps",
    "decode_tokens",
    "simulated_s",
    "wall_s",
]


def test_names_that_others_read_are_all_there_and_no_name_comes_twice():
    assert sorted(metric.name for metric in METRICS) == sorted(FIXED_NAMES)
    assert len({metric.title for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_definition_is_one_sentence_with_a_unit(metric):
    assert metric.unit
    assert metric.definition.endswith(".")
    assert ". " not in metric.definition


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("page_coverage_mean", 0.98534, "98.53"),
        ("mean_run", 2900.04, "2,900.0"),
        ("moved_rows_per_decoded_token", 0.0204, "0.020"),
        ("bytes_moved", 0, "0 B"),
        ("bytes_moved", 405_504_000, "405.50 MB"),
        ("bytes_moved", 2.5e15, "2,500.00 TB"),
        ("steps", 119_000, "119,000"),
        ("mean_run", math.nan, "-"),
        ("mean_run", math.inf, "-"),
        ("mean_run", None, "-"),
    ],
)
def test_values_are_written_for_people(name, number, text):
    assert metrics.get(name).text(number) == text


def test_value_of_a_missing_or_infinite_scalar_is_none():
    assert metrics.value({}, "mean_run") is None
    assert metrics.value({"mean_run": math.nan}, "mean_run") is None
    assert metrics.value({"mean_run": 0.0}, "mean_run") == 0.0


def test_a_name_outside_the_list_is_a_mistake_of_ours():
    with pytest.raises(KeyError):
        metrics.value({"mean_rum": 1.0}, "mean_rum")
    assert metrics.undocumented(["mean_run", "zeta", "mean_rum"]) == ["mean_rum", "zeta"]


def test_wall_time_is_left_out_when_two_runs_are_compared():
    assert metrics.repeatable({"wall_s": 1.0, "steps": 2.0}) == {"steps": 2.0}
