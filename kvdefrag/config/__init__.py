"""Settings: one frozen model, read from a file and the environment only when asked."""

from kvdefrag.config.explain import explain
from kvdefrag.config.loading import Loaded, load_config, load_with_origins
from kvdefrag.config.model import Config
from kvdefrag.config.sections import (
    Attention,
    Consumer,
    Control,
    Mechanisms,
    Observe,
    Placement,
    Relocation,
)
from kvdefrag.config.text import as_yaml, default_file

__all__ = [
    "Attention",
    "Config",
    "Consumer",
    "Control",
    "Loaded",
    "Mechanisms",
    "Observe",
    "Placement",
    "Relocation",
    "as_yaml",
    "default_file",
    "explain",
    "load_config",
    "load_with_origins",
]
