"""Prevents and repairs KV-cache fragmentation in a live SGLang server, and simulates the gain."""

__version__ = "0.1.0"
