"""Positions of a model as Megatron-LM's arguments: learned, or rotary with a base and the scaling of Llama 3.1.

Megatron-LM's `--use-rope-scaling` has one number, the factor; the rest is fixed in it (low 1, high 4, 8192 positions:
core/models/common/embeddings/rotary_pos_embedding.py). Linear scaling is an interpolation factor. Other kinds cannot be
said.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetplan.specs.model import Model, Table

_BASES = {"llama": 10000, "mistral": 10000, "mixtral": 1_000_000, "qwen2": 10000, "qwen3": 10000, "qwen3_moe": 10000}
"""Rotary base of families whose published files leave it to their class (transformers configuration classes)."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def positions(model: Model) -> dict[str, int | str | bool | float] | None:
    """Return a model's positions, or None where Megatron-LM's arguments cannot say them."""
    tables = [o for layer in model.chain for o in layer.operators if isinstance(o, Table)]
    if any(table.split == "none" for table in tables):
        return {"position_embedding_type": "learned_absolute"}
    parameters = _mapping(model.published.get("rope_parameters"))
    base = model.published.get("rope_theta") or parameters.get("rope_theta") or _BASES.get(model.family)
    if not isinstance(base, int | float) or base != int(base):
        found: dict[str, int | str | bool | float] = {"rotary_base": "$ROTARY_BASE"}
    else:
        found = {"rotary_base": int(base)}
    scaling = _scaling(_mapping(model.published.get("rope_scaling")) or parameters)
    return None if scaling is None else {"position_embedding_type": "rope", **found, **scaling}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _scaling(given: Mapping[str, object]) -> dict[str, int | str | bool | float] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    factor = given.get("factor")
    if kind == "default":
        return {}
    if not isinstance(factor, int | float):
        return None
    if kind == "llama3" and all(given.get(key, value) == value for key, value in _LLAMA3.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    if kind == "linear" and factor == int(factor):
        return {"rotary_seq_len_interpolation_factor": int(factor)}
    return None
