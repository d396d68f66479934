"""What a step knows of the engine."""

from __future__ import annotations

import numpy as np
import torch

from kvdefrag.core.view import EngineView, to_device


def test_a_view_names_no_shared_values_unless_the_engine_does():
    none = np.zeros(0, dtype=np.int64)
    view = EngineView(0, torch.zeros((1, 4), dtype=torch.int32), none, none, none, none, none)

    assert list(view.shared_values()) == []
    assert view.device == torch.device("cpu")


def test_host_numbers_reach_the_device_as_int64():
    tensor = to_device(np.array([3, 1, 2]), torch.device("cpu"))

    assert (tensor.tolist(), tensor.dtype) == ([3, 1, 2], torch.int64)


def test_numbers_with_gaps_between_them_are_packed():
    host = np.arange(12).reshape(3, 4)

    assert to_device(host[:, 1], torch.device("cpu")).tolist() == [1, 5, 9]
    assert to_device(host[:, ::-1], torch.device("cpu")).tolist()[0] == [3, 2, 1, 0]
    assert to_device(host[:0], torch.device("cpu")).shape == (0, 4)
