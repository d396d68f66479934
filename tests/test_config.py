"""Settings: layers, bounds, and refusals that name the key, the value and what is allowed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kvdefrag.config import (
    Config,
    Consumer,
    Relocation,
    as_yaml,
    default_file,
    load_config,
    load_with_origins,
)
from kvdefrag.config.byte_count import format_bytes, parse_bytes
from kvdefrag.config.text import allowed, leaves
from kvdefrag.errors import ConfigError

ROOT = Path(__file__).parents[1]
CONFIG_YAML = ROOT / "config.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ)
    return str(caught.value)


def keys(content: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in content.items():
        found |= keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


# The file at the root


def test_config_yaml_is_what_the_model_says() -> None:
    assert CONFIG_YAML.read_text(encoding="utf-8") == default_file(), "run `make config`"


def test_config_yaml_lists_every_key_and_loads_as_the_defaults() -> None:
    content = yaml.safe_load(CONFIG_YAML.read_text(encoding="utf-8"))

    assert keys(content) == {key for key, _ in leaves()}
    assert load_config(CONFIG_YAML, {}) == Config()


def test_config_yaml_has_a_comment_above_each_key() -> None:
    lines = CONFIG_YAML.read_text(encoding="utf-8").splitlines()
    uncommented = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if line and not line.lstrip().startswith("#") and not before.lstrip().startswith("# ")
    ]

    assert uncommented == []


def test_every_setting_has_a_description_and_says_what_it_takes() -> None:
    for key, field in leaves():
        assert field.description, key
        assert "<" not in allowed(field), key


def test_the_shipped_defaults_are_the_ones_agreed() -> None:
    config = Config()

    assert (config.enabled, config.kill_switch, config.page) == (False, False, 64)
    assert (config.placement.free_list, config.placement.reservation) == ("two_ended", True)
    assert (config.relocation.mode, config.relocation.dry_run) == ("auto", False)
    assert config.relocation.bytes_per_step == 64 * 2**20
    assert config.relocation.duty_bytes_per_step == 8 * 2**20
    assert config.consumers == ()
    assert config.attention.enabled is False


# Layers


def test_environment_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "page: 32\nplacement: {free_list: sorted, reorder_interval: 4}\n")

    config = load_config(path, {"KVDEFRAG_PLACEMENT__FREE_LIST": "fifo"})

    assert config.page == 32
    assert config.placement.free_list == "fifo"
    assert config.placement.reorder_interval == 4
    assert config.placement.reservation is True


def test_overrides_win_over_everything(tmp_path: Path) -> None:
    path = write(tmp_path, "page: 32\n")

    config = load_config(path, {"KVDEFRAG_PAGE": "16"}, overrides={"page": 128})

    assert config.page == 128


def test_the_environment_names_the_file_unless_the_caller_does(tmp_path: Path) -> None:
    path = write(tmp_path, "page: 32\n")
    environ = {"KVDEFRAG_CONFIG": str(path)}

    assert load_config(None, environ).page == 32
    assert load_config(CONFIG_YAML, environ).page == 64
    assert load_config(None, {"KVDEFRAG_CONFIG": ""}) == Config()


def test_enabled_is_an_ordinary_setting_in_the_environment() -> None:
    assert load_config(None, {"KVDEFRAG_ENABLED": "1"}).enabled is True
    assert load_config(None, {"KVDEFRAG_ENABLED": "false"}).enabled is False


def test_a_section_and_a_list_can_be_given_as_json() -> None:
    environ = {
        "KVDEFRAG_RELOCATION": '{"mode": "threshold", "dry_run": true}',
        "KVDEFRAG_RELOCATION__MODE": "off",
        "KVDEFRAG_CONSUMERS": '[{"kind": "transfer", "gain": 0.5}]',
    }

    config = load_config(None, environ)

    assert (config.relocation.mode, config.relocation.dry_run) == ("off", True)
    assert config.consumers == (Consumer(kind="transfer", gain=0.5),)


def test_null_in_the_environment_unsets_a_path(tmp_path: Path) -> None:
    path = write(tmp_path, "profile: h200.json\n")

    assert load_config(path, {}).profile == Path("h200.json")
    assert load_config(path, {"KVDEFRAG_PROFILE": "null"}).profile is None


def test_building_a_config_reads_neither_environment_nor_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVDEFRAG_PAGE", "16")
    monkeypatch.setenv("KVDEFRAG_PLACEMENT__FREE_LIST", "fifo")

    assert Config().page == 64
    assert load_config(None, {}) == Config()


def test_other_variables_are_left_alone() -> None:
    assert load_config(None, {"PATH": "/bin", "MY_KVDEFRAG_PAGE": "3"}) == Config()


def test_the_caller_keeps_its_overrides() -> None:
    overrides = {"placement": {"reservation": False}}
    before = copy.deepcopy(overrides)

    load_config(None, {"KVDEFRAG_PLACEMENT__FREE_LIST": "fifo"}, overrides=overrides)

    assert overrides == before


def test_origins_name_the_source_of_each_setting(tmp_path: Path) -> None:
    path = write(tmp_path, "page: 32\nrelocation: {mode: off, dry_run: true}\n")

    loaded = load_with_origins(
        path, {"KVDEFRAG_RELOCATION__MODE": "auto"}, overrides={"enabled": True}
    )

    assert loaded.origins == {
        "page": str(path),
        "relocation.mode": "KVDEFRAG_RELOCATION__MODE",
        "relocation.dry_run": str(path),
        "enabled": "override",
    }


# What a value may be


def test_off_in_a_file_is_the_word_and_not_a_boolean(tmp_path: Path) -> None:
    path = write(tmp_path, "placement: {checks: off}\nrelocation:\n  mode: off\n")

    config = load_config(path, {})

    assert (config.placement.checks, config.relocation.mode) == ("off", "off")


def test_a_config_survives_being_written_and_read(tmp_path: Path) -> None:
    config = load_config(
        None,
        {
            "KVDEFRAG_RELOCATION__MODE": "off",
            "KVDEFRAG_RELOCATION__BYTES_PER_STEP": "1000001",
            "KVDEFRAG_CONSUMERS": '[{"kind": "tail"}]',
            "KVDEFRAG_OBSERVE__EVENTS_PATH": "on # it",
        },
    )

    assert load_config(write(tmp_path, as_yaml(config, describe=True)), {}) == config


def test_settings_are_frozen_all_the_way_down() -> None:
    config = Config()
    parts: list[BaseModel] = [config, config.relocation, config.relocation.mechanisms]

    for part in parts:
        name = next(iter(type(part).model_fields))
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, getattr(part, name))
    assert hash(config) == hash(Config())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("1GB", 10**9),
        ("8_192", 8192),
        ("512B", 512),
        ("0", 0),
    ],
)
def test_a_byte_count_is_read_as_a_person_means_it(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.3B", "64 Mibi", "1e6", "٣", "1 2"])
def test_what_is_no_byte_count_is_refused(text: str) -> None:
    assert "relocation.bytes_per_step" in refusal(KVDEFRAG_RELOCATION__BYTES_PER_STEP=text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_byte_count_survives_being_written_and_read(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


# Refusals


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("page: 17", ["page: 17", "16 | 32 | 64 | 128"]),
        ("page: true", ["page: true", "16 | 32"]),
        ("page: {x: 1}", ["page: {x: 1}", "16 | 32"]),
        ("placement: {free_list: lifo}", ["placement.free_list: lifo", "fifo | sorted"]),
        ("placement: {reorder_interval: 0}", ["placement.reorder_interval: 0", "1 .. 4096"]),
        ("relocation: {tenure_interval: true}", ["relocation.tenure_interval: true", "1 .. "]),
        ("relocation: {tenure_interval: 1.5}", ["relocation.tenure_interval: 1.5", "1 .. "]),
        ("relocation: {coverage_low: .nan}", ["relocation.coverage_low: .nan", "0 .. 1"]),
        ("relocation: {bytes_per_step: 65GiB}", ["relocation.bytes_per_step: 65GiB", "64GiB"]),
        ("relocation: {mechanisms: {tenure: 2}}", ["relocation.mechanisms.tenure: 2", "true | "]),
        ("placement:", ["placement: null", "a mapping with the keys free_list, "]),
        ("consumers: transfer", ["consumers: transfer", "a list of mappings", "kind, gain"]),
        ("consumers: [{kind: tale}]", ["consumers[0].kind: tale", "paged_attention | transfer"]),
        ("consumers: [{gain: 0.5}]", ["consumers[0].kind: missing", "paged_attention | "]),
        ("consumers: [3]", ["consumers[0]: 3", "a list of mappings"]),
        ("consumers: [{kind: tail, gain: 2}]", ["consumers[0].gain: 2", "0 .. 1 | null"]),
        ("profile: ''", ["profile: ''", "a path | null"]),
    ],
)
def test_a_bad_value_is_refused_by_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    path = write(tmp_path, text)

    message = refusal(path)

    assert [part for part in [*expected, f"from {path}"] if part not in message] == []


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("pgae: 64", "pgae", "page"),
        ("reloction: {mode: off}", "reloction", "relocation"),
        ("placement: {free_lsit: fifo}", "placement.free_lsit", "placement.free_list"),
        ("free_list: fifo", "free_list", "placement.free_list"),
        ("placement: {coverage_low: 0.5}", "placement.coverage_low", "relocation.coverage_low"),
        ("consumers: [{kynd: tail}]", "consumers[0].kynd", "consumers[0].kind"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(
    tmp_path: Path, text: str, key: str, meant: str
) -> None:
    message = refusal(write(tmp_path, text))

    assert f"{key}: unknown key" in message
    assert f"did you mean {meant}? Allowed: " in message


def test_a_key_like_no_other_is_refused_with_those_that_are_allowed(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "attention: {zzz: 1}"))

    assert message.startswith("attention.zzz: unknown key with value 1 ")
    assert message.endswith("; allowed: enabled, crossover")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVDEFRAG_PLACMENT", "KVDEFRAG_PLACEMENT"),
        ("KVDEFRAG_ENABLE", "KVDEFRAG_ENABLED"),
        ("KVDEFRAG_CONFIGS", "KVDEFRAG_CONFIG"),
        ("KVDEFRAG_PLACEMENT_FREE_LIST", "KVDEFRAG_PLACEMENT__FREE_LIST"),
        ("KVDEFRAG_PLACEMENT__FREE_LSIT", "KVDEFRAG_PLACEMENT__FREE_LIST"),
        ("KVDEFRAG_PAGE__X", "KVDEFRAG_PAGE"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    message = refusal(**{name: "fifo"})

    assert message == f"{name}: unknown setting with value 'fifo'; did you mean {meant}?"


def test_a_variable_like_no_other_is_refused_with_those_that_are_allowed() -> None:
    message = refusal(KVDEFRAG_="1")

    assert message.startswith("KVDEFRAG_: unknown setting")


def test_a_bad_value_in_the_environment_names_the_variable() -> None:
    message = refusal(KVDEFRAG_ENABLED="maybe")

    assert message == (
        "enabled: maybe (from KVDEFRAG_ENABLED) is not allowed; allowed: true | false"
    )


@pytest.mark.parametrize("name", ["KVDEFRAG_CONSUMERS", "KVDEFRAG_RELOCATION__MECHANISMS"])
def test_a_list_or_section_that_is_no_json_names_the_variable(name: str) -> None:
    message = refusal(**{name: "junk"})

    assert message.startswith(f"{name}: 'junk' is not allowed; allowed: JSON, a ")


@pytest.mark.parametrize("value", [object(), (1, 2), {"x": object()}])
def test_an_override_that_no_file_could_hold_is_refused_all_the_same(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^page: .* \(from override\) is not allowed"):
        load_config(None, {}, overrides={"page": value})


def test_marks_out_of_order_name_both_marks(tmp_path: Path) -> None:
    path = write(tmp_path, "relocation: {coverage_low: 0.99, whole_free_high: 0.01}")

    assert refusal(path).splitlines() == [
        "relocation.coverage_high: 0.98 must be above coverage_low (0.99)",
        f"relocation.whole_free_high: 0.01 (from {path}) must be above whole_free_low (0.01)",
    ]
    with pytest.raises(ValidationError, match="must be above coverage_low"):
        Relocation(coverage_low=0.5, coverage_high=0.5)


def test_every_refused_key_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "page: 1\nenabled: 5\nnope: 1\n"))

    assert [line.split(":")[0] for line in message.splitlines()] == ["enabled", "page", "nope"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("page: 64\npage: 32\n", "line 2: key 'page' is given twice"),
        ("relocation:\n  mode: off\n  mode: auto\n", "line 3: key 'mode' is given twice"),
        ("1: 2\n", "line 1: key '1' is not text"),
        ("<<: {page: 64}\n", "line 1: key '<<' is not text"),
        ("placement: &a {x: *a}\n", "aliases are not allowed"),
        ("- page\n", "must hold a mapping"),
        ("page: [\n", "line 2: "),
        ("page: !!python/object:os.system 1\n", "could not determine a constructor"),
    ],
)
def test_yaml_that_says_something_else_than_it_seems_is_refused(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = write(tmp_path, text)

    message = refusal(path)

    assert message.startswith(f"{path}: ")
    assert expected in message


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n"), {}) == Config()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"page: \xff\n")

    assert refusal(missing) == f"{missing}: cannot be read: No such file or directory"
    assert refusal(binary) == f"{binary}: not UTF-8 text, at byte 6"
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read: ")
