"""Brings small device results to the host some steps late, without ever waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class Readback:
    """Copies scalars and small tensors to the host and delivers them a fixed number of steps later.

    The delay is counted in steps of the caller's own loop, never by asking an event: replicas of
    this code on several ranks must learn the same thing at the same step. The caller promises
    that the copies of `delay` steps ago have finished, as they have once the engine has processed
    the results of the step they were enqueued before.

    Args:
        delay: Steps between submission and delivery; 0 delivers at once (host tensors only).
    """

    def __init__(self, delay: int) -> None:
        self._delay = delay
        self._step = 0
        self._queue: deque[
            tuple[int, Tensor, Callable[[int], None] | None, Callable[[Tensor], None] | None]
        ] = deque()

    @property
    def delay(self) -> int:
        """Steps between submission and delivery."""
        return self._delay

    @property
    def pending(self) -> int:
        """Results submitted and not delivered yet."""
        return len(self._queue)

    def submit(self, value: Tensor, deliver: Callable[[int], None]) -> None:
        """Deliver a scalar tensor as an integer, `delay` steps from now."""
        self._enqueue(value, deliver, None)

    def submit_tensor(self, value: Tensor, deliver: Callable[[Tensor], None]) -> None:
        """Deliver a host copy of a tensor, `delay` steps from now."""
        self._enqueue(value, None, deliver)

    def advance(self) -> None:
        """Count one step and deliver what is due, oldest first."""
        self._step += 1
        while self._queue and self._queue[0][0] <= self._step:
            _deliver(*self._queue.popleft()[1:])

    def clear(self) -> None:
        """Forget what is under way."""
        self._queue.clear()

    def _enqueue(
        self,
        value: Tensor,
        as_int: Callable[[int], None] | None,
        as_tensor: Callable[[Tensor], None] | None,
    ) -> None:
        host = _to_host(value)
        if self._delay == 0:
            _deliver(host, as_int, as_tensor)
        else:
            self._queue.append((self._step + self._delay, host, as_int, as_tensor))


def _to_host(value: Tensor) -> Tensor:
    # A fresh pinned buffer each time: a reused one could be overwritten before it was read.
    if value.device.type == "cpu":
        return value.clone()
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _deliver(
    host: Tensor,
    as_int: Callable[[int], None] | None,
    as_tensor: Callable[[Tensor], None] | None,
) -> None:
    if as_int is not None:
        as_int(int(host))
    if as_tensor is not None:
        as_tensor(host)
