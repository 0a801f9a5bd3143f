"""Attention of one rank: its heads, the positions of its tokens, and under context parallelism everybody's keys.

With `cp` ranks a sample's sequence is cut into ``2 cp`` equal pieces and rank ``r`` holds pieces ``r`` and
``2 cp - 1 - r``, so that causal attention is balanced (Llama 3 herd of models, 2024, 3.3.2). Keys and values are
gathered from all of them; a mask by position does the rest, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hetplan.runtime.linear import Linear
from hetplan.runtime.numerics import Numerics
from hetplan.runtime.parallel import Mesh, enter, gather_sequence, leave
from hetplan.runtime.ranks import position_ranges
from hetplan.specs.model import Attention as AttentionSpec

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one microbatch on one rank: `num_samples` times the same positions."""

    num_samples: int
    positions: torch.Tensor
    """[seq] of this cp rank, ascending within each piece."""
    ids: torch.Tensor | None = None
    """[num_samples * seq], where the embedding is."""
    labels: torch.Tensor | None = None
    """[num_samples * seq], where the head is."""


@lru_cache(maxsize=32)
def positions_of(seq_len: int, cp: int, cp_rank: int, device: torch.device) -> torch.Tensor:
    """Return the positions a cp rank holds, in order."""
    return torch.cat([torch.arange(first, end, device=device) for first, end in position_ranges(seq_len, cp, cp_rank)])


class Norm(nn.Module):
    """RMS norm, or layer norm where there is a bias or no parameter at all."""

    def __init__(self, parameters: Parameters, name: str, epsilon: float) -> None:
        super().__init__()
        self.weight = parameters.get(f"{name}.weight")
        self.bias = parameters.get(f"{name}.bias")
        self.epsilon = epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows normalised over their last dimension."""
        shape = rows.shape[-1:]
        if self.weight is not None and self.bias is None:
            return functional.rms_norm(rows, shape, self.weight, self.epsilon)
        return functional.layer_norm(rows, shape, self.weight, self.bias, self.epsilon)


class Attention(nn.Module):
    """Projections, rotary positions, scores and output of the heads of one tp rank."""

    def __init__(self, spec: AttentionSpec, parameters: Parameters, mesh: Mesh, numerics: Numerics) -> None:
        super().__init__()
        self.spec, self.mesh, self.numerics = spec, mesh, numerics
        names = ("q", "k", "v", "output")
        self.q, self.k, self.v, self.output = (
            Linear(parameters[f"{name}.weight"], parameters.get(f"{name}.bias")) for name in names
        )
        has_norms = "q_norm.weight" in parameters
        self.q_norm = Norm(parameters, "q_norm", numerics.norm_epsilon) if has_norms else None
        self.k_norm = Norm(parameters, "k_norm", numerics.norm_epsilon) if has_norms else None
        self.recomputes_scores = False

    def forward(self, rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return the attention of normalised rows, bias included."""
        rows = enter(rows, self.mesh)
        q, k, v = (part.with_bias(rows) for part in (self.q, self.k, self.v))
        q, k, v = (self._heads(part, tokens) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if not self.numerics.learned_positions:
            table = _rotary(tokens.positions, self.spec.qk_head_dim, self.numerics.rope_theta, q.dtype)
            q, k = _rotated(q, table), _rotated(k, table)
        if self.recomputes_scores and torch.is_grad_enabled():
            out = checkpoint(self._attend, q, k, v, tokens, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._attend(q, k, v, tokens)
        flat = out.transpose(1, 2).reshape(rows.shape[0], -1)
        return self.output.add_bias(leave(self.output(flat), self.mesh))

    def _heads(self, rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Return rows as [samples, heads, seq, head width]."""
        width = self.spec.qk_head_dim
        return rows.view(tokens.num_samples, tokens.positions.shape[0], -1, width).transpose(1, 2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        keys = tokens.positions
        cp = self.mesh.cp
        if cp.degree > 1:
            k, v = self._everybodys(torch.stack([k, v]))
            length = keys.shape[0] * cp.degree
            keys = torch.cat([positions_of(length, cp.degree, r, keys.device) for r in range(cp.degree)])
        window = self.spec.window
        windowed = window is not None and window < keys.shape[0]
        if cp.degree == 1 and not windowed:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=self.spec.causal, enable_gqa=grouped)
        back = tokens.positions[:, None] - keys[None, :]
        mask = back >= 0
        if window is not None and windowed:
            mask &= back < window
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    def _everybodys(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all cp ranks, sequences one after the other."""
        stacked = gather_sequence(both, self.mesh)
        joined = torch.cat(stacked.unbind(0), dim=3)
        return joined[0], joined[1]


@lru_cache(maxsize=8)
def _angles(length: int, width: int, theta: float, device: torch.device) -> torch.Tensor:
    powers = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    return torch.arange(length, dtype=torch.float64, device=device)[:, None] * theta**-powers


@lru_cache(maxsize=32)
def _rotary(positions: torch.Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [seq, width]: the first half of a head turns with the second."""
    angles = _angles(int(positions.max()) + 1, width, theta, positions.device)[positions]
    both = torch.cat([angles, angles], dim=-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return both.cos().to(wide), both.sin().to(wide)


def _rotated(heads: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosines, sines = table
    first, second = heads.to(cosines.dtype).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads * cosines + turned * sines).to(heads.dtype)
