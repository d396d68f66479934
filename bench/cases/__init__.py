"""Benchmark cases: each module gives `entries()`; a case that cannot run says why."""
