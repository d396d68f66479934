"""What contiguity is worth on one GPU: a profile read from JSON, with what was measured named."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvdefrag.errors import ConfigError

Provenance = Literal["measured", "assumed", "derived"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttentionCost(_Section):
    """Attention of one kernel family over the prefix, for all layers.

    Attributes:
        name: Kernel family in words.
        scattered_gbps, paged_gbps: GB/s of KV read for tokens outside and inside aligned pages.
        fixed_us: Microseconds a layer that do not depend on the length.
        left_over_us: Microseconds a layer more when some tokens are inside pages and some not.
    """

    name: str
    scattered_gbps: float = Field(default=..., gt=0)
    paged_gbps: float = Field(default=..., gt=0)
    fixed_us: float = Field(default=..., ge=0)
    left_over_us: float = Field(default=..., ge=0)


class DeviceProfile(_Section):
    """Costs on one GPU for one model shape.

    Attributes:
        layers, row_bytes: Layers, and bytes of one token in one layer.
        copy_gbps: Device-to-device copy, read + write.
        relocation_efficiency: Share of that a relocation reaches.
        relocation_fixed_us: Microseconds of a relocation that do not depend on its rows.
        step_base_us: A decode or verify step without its attention over the prefix.
        prefill_us_per_token, prefill_base_us: A prefill step.
        decode, verify: Attention by consumer: `stock` and `paged` kernels.
        provenance: For every figure, whether it was measured, and where.
    """

    version: Literal[1]
    name: str
    layers: int = Field(default=..., ge=1)
    row_bytes: int = Field(default=..., ge=1)
    copy_gbps: float = Field(default=..., gt=0)
    relocation_efficiency: float = Field(default=..., gt=0, le=1)
    relocation_fixed_us: float = Field(default=..., ge=0)
    step_base_us: float = Field(default=..., ge=0)
    prefill_base_us: float = Field(default=..., ge=0)
    prefill_us_per_token: float = Field(default=..., ge=0)
    decode: dict[Literal["stock", "paged"], AttentionCost]
    verify: dict[Literal["stock", "paged"], AttentionCost]
    transfer_us_per_descriptor: float = Field(default=..., ge=0)
    provenance: dict[str, str]

    @field_validator("decode", "verify")
    @classmethod
    def _both_kernels(cls, kernels: dict[str, AttentionCost]) -> dict[str, AttentionCost]:
        if len(kernels) < 2:
            raise ValueError("must hold stock and paged")
        return kernels

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers."""
        return self.layers * self.row_bytes

    def relocation_us(self, rows: int) -> float:
        """Return the microseconds that moving `rows` rows takes."""
        if rows == 0:
            return 0.0
        rate = self.copy_gbps * self.relocation_efficiency * 1e3
        return self.relocation_fixed_us + 2 * rows * self.bytes_per_slot / rate

    def paged_gain_us(self, *, verify: bool = False) -> float:
        """Return microseconds a step that one token saves once it lies in an aligned page."""
        cost = (self.verify if verify else self.decode)["paged"]
        slower = self.bytes_per_slot / (cost.scattered_gbps * 1e3)
        return max(0.0, slower - self.bytes_per_slot / (cost.paged_gbps * 1e3))

    def break_even_steps(self, gain_us: float) -> float:
        """Return steps a moved token must live for its copy to pay; infinite without a gain."""
        rate = self.copy_gbps * self.relocation_efficiency * 1e3
        cost = 2 * self.bytes_per_slot / rate
        return cost / gain_us if gain_us > 0 else float("inf")


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile.

    Raises:
        ConfigError: The file is missing, is no JSON, or a field is wrong; names it.
    """
    try:
        return DeviceProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"profile: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"profile: {path}: {key or 'file'}: {first['msg']}") from error
