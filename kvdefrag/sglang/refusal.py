"""Why the plugin leaves a server as stock, in words that name what stands in the way."""

from __future__ import annotations


class Refusal(Exception):
    """The plugin does not attach.

    Args:
        what: Setting, class or attribute that stands in the way, with its value.
        why: What is supported instead.
        change: What to do about it, in words; empty if nothing can be.
    """

    def __init__(self, what: str, why: str, change: str = "") -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.change = what, change
