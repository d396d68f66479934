"""YAML read strictly: duplicate keys and aliases are refused, `off` is a word."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvdefrag.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """Refuses what the usual loader passes over in silence."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        # An alias may name the mapping it lies in, and no setting needs one.
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.MarkedYAMLError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                problem = f"key {key!r} is not text"
                raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
            if key in seen:
                problem = f"key {key!r} is given twice"
                raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads `off`, `on`, `yes` and `no` as booleans, and `off` is a mode here.
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; an empty file gives an empty one.

    Raises:
        ConfigError: The file cannot be read, is not YAML, gives a key twice, or is no mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text, at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_where(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a mapping of settings, not {content!r:.60}")
    return content


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return problem if mark is None else f"line {mark.line + 1}: {problem}"
