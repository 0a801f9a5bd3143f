"""Measured layers and links: what a profiler wrote down, which takes the place of what formulas say.

A `LayerTable` holds seconds and bytes of single layers by device, tensor-parallel degree and microbatch; `LinkFits`
hold the bandwidth between two places by message size. What a table does not cover is asked of its measured neighbours
or refused; it is never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

UpdateScope = Literal["layer", "stage"]
ANY_SITE = "*"
"""Stands for every site in a fit that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A run of equal layers of the chain on one device kind: one microbatch, as one rank of a tp group runs it."""

    device: str
    tp: int
    microbatch: int
    """Samples a rank sees at once."""
    first_layer: int
    end_layer: int
    forward_s: float
    backward_s: float
    """Communication inside the tp group included in both."""
    update_s: float = 0.0
    """One optimizer step."""
    params: float | None = None
    """Parameters one rank holds of a layer; None: as the model says."""
    states_bytes: float | None = None
    """Weights, gradients and optimizer states of a layer on one device; None: `params` times `bytes_per_param`."""
    saved_bytes: float | None = None
    """Kept of one microbatch from a layer's forward to its backward pass; None: as the model says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """All measured layers of one model."""

    model: str
    num_layers: int
    """Layers of the chain, embedding and head included."""
    rows: tuple[LayerRow, ...]
    bytes_per_param: float | None = None
    """Weights, gradients and optimizer states a parameter takes; None: as precision and optimizer say."""
    reserve_bytes: Mapping[int, float] = field(default_factory=dict)
    """Memory held besides, by the least tp it holds for; empty: the device's constant."""
    update_scope: UpdateScope = "layer"
    """layer: a stage updates layer after layer; stage: what stands at its first layer is the whole stage's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """Bandwidth of a message, a polynomial in `x = log2(bytes / 1e6)`, in bytes a second."""

    coefficients: tuple[float, ...]
    """Highest power first."""
    max_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """One side of a fit: devices of one kind at one site, so many of a node taking part."""

    device: str
    site: str = ANY_SITE
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFits:
    """Which curve holds between which places; a pair given once holds both ways."""

    between: Mapping[tuple[LinkEnd, LinkEnd], LinkCurve] = field(default_factory=dict)
    """Between nodes; where `inside` says nothing, inside them as well."""
    inside: Mapping[tuple[str, int], LinkCurve] = field(default_factory=dict)
    """(device, ranks) within one node."""
    bucket_bytes: float | None = None
    """Gradients are reduced in pieces of at most so many bytes; None: at once."""
