"""The device profile that ships with the package."""

from __future__ import annotations

from pathlib import Path

from kvdefrag.core.profile import DeviceProfile, load_profile
from kvdefrag.data import DEFAULT_PROFILE, open_data


def default_profile() -> DeviceProfile:
    """Return the shipped profile; its `provenance` says what is measured and what assumed."""
    with open_data(DEFAULT_PROFILE) as file:
        return DeviceProfile.model_validate_json(file.read())


def profile_or_default(path: Path | None) -> DeviceProfile:
    """Return the profile at `path`, or the shipped one.

    Raises:
        ConfigError: The file cannot be read or a field is wrong.
    """
    return default_profile() if path is None else load_profile(path)
