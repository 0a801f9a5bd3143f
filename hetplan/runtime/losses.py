"""Cross-entropy over words that a tp group holds in parts.

With ``m`` the largest logit and ``z = sum exp(l - m)`` over all words, a token's loss is ``log z + m - l[label]`` and
its gradient ``softmax - onehot``. Both need one maximum and two sums over the group, and no rank ever sees all logits
(Shoeybi 2019, arXiv:1909.08053, section 3). Everything is computed in fp32, or in fp64 where the model is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from hetplan.runtime.parallel import Mesh


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, first_word: int, mesh: Mesh) -> torch.Tensor:
    """Return the sum of the losses of all rows; `logits` are those of words from `first_word` on."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if mesh.tp.degree == 1:
        return functional.cross_entropy(wide, labels, reduction="sum")
    return _CutCrossEntropy.apply(wide, labels, first_word, mesh)


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first_word: int, mesh: Mesh) -> torch.Tensor:
        with mesh.clock.on("tp"):
            top = logits.amax(dim=1)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=mesh.tp.group)
        powers = (logits - top[:, None]).exp()
        mine = (labels >= first_word) & (labels < first_word + logits.shape[1])
        where = torch.where(mine, labels - first_word, 0)[:, None]
        picked = (logits.gather(1, where)[:, 0] - top) * mine
        both = torch.stack([powers.sum(dim=1), picked])
        with mesh.clock.on("tp"):
            dist.all_reduce(both, group=mesh.tp.group)
        ctx.save_for_backward(powers / both[0][:, None], where, mine)
        return (both[0].log() - both[1]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, where, mine = ctx.saved_tensors
        change = softmax.scatter_add(1, where, -mine[:, None].to(softmax.dtype))
        return change * gradient, None, None, None
