from __future__ import annotations

from pathlib import Path

import pytest

from kvdefrag.sim.report.docs import metrics_markdown, schema_json

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "made"), [("metrics.md", metrics_markdown), ("simulate.schema.json", schema_json)]
)
def test_committed_page_equals_what_the_code_makes(name, made):
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == made(), "run: python -m kvdefrag.sim.report.docs"
