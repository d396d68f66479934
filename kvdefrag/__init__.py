"""Prevents and repairs KV-cache fragmentation in a live SGLang server, and simulates what that buys."""

__version__ = "0.1.0"
