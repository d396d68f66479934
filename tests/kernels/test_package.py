from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import kvdefrag_kernels

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, kvdefrag_kernels as k
rows = torch.arange(12).view(4, 3)
one, two = torch.tensor([1]), torch.tensor([2])
k.relocate_rows_torch([rows], one, two)
assert rows.tolist() == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [9, 10, 11]]
import os
os.environ["TRITON_INTERPRET"] = "1"
try:
    k.relocate_rows(k.BufferTable([rows]), one, two)
except RuntimeError as error:
    assert "needs Triton" in str(error), error
else:
    raise AssertionError("launched without Triton")
"""


def test_references_work_and_launches_explain_themselves_without_triton():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_every_exported_name_exists():
    assert sorted(kvdefrag_kernels.__all__) == kvdefrag_kernels.__all__
    assert all(hasattr(kvdefrag_kernels, name) for name in kvdefrag_kernels.__all__)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    one = torch.tensor([1])
    table = kvdefrag_kernels.BufferTable([torch.zeros(3, 4)])
    with pytest.raises(RuntimeError, match="use relocate_rows_torch"):
        kvdefrag_kernels.relocate_rows(table, one, one)
