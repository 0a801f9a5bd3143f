"""Routed experts: every token runs the `top_k` its router prefers, on whichever ep rank holds them.

Weights of the chosen experts are their softmax probabilities, made to sum to 1 where the model says so (Jiang 2024,
arXiv:2401.04088). No token is dropped and no capacity is set; no auxiliary loss is added to the router (it would depend
on how the batch is cut). Rows are sorted by expert, sent to the ranks that hold them, sorted by local expert there, and
go back the same way.

Routing runs between `enter` and `leave`, on all rows of the tp group: outputs of experts are partial sums there, and so
are the router's gradients, as of any weight cut by tp.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hetplan.runtime.attention import Parameters
from hetplan.runtime.linear import Linear, activation, product
from hetplan.runtime.numerics import Numerics
from hetplan.runtime.parallel import Mesh, exchange
from hetplan.specs.model import Experts as ExpertsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """Where rows go: `order` sorts (token, choice) pairs by expert."""

    order: torch.Tensor
    counts: torch.Tensor
    """Rows for each expert."""


class Experts(nn.Module):
    """The experts one rank holds, and the router, which every rank holds."""

    def __init__(self, spec: ExpertsSpec, parameters: Parameters, mesh: Mesh, numerics: Numerics) -> None:
        super().__init__()
        self.spec, self.mesh, self.renormalise = spec, mesh, numerics.renormalise
        self.router = Linear(parameters[f"{spec.router.name}.weight"], parameters.get(f"{spec.router.name}.bias"))
        gate, up, down = (parameters[f"{spec.name}.{linear.name}.weight"] for linear in spec.linears)
        self.gate, self.up, self.down = gate, up, down
        self.activation = activation(numerics.activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this tp rank's part of the experts' weighted outputs."""
        weights, choices = self._choose(rows)
        flat = choices.flatten()
        order = torch.argsort(flat, stable=True)
        route = _Route(order=order, counts=torch.bincount(flat, minlength=self.spec.num_experts))
        sent = rows[order // self.spec.top_k]
        done = self._run(sent, route.counts.tolist()) if self.mesh.ep.degree == 1 else self._run_afar(sent, route)
        back = torch.empty_like(done).index_copy(0, order, done)
        return (back.view(*choices.shape, -1) * weights[..., None].to(back.dtype)).sum(1)

    def _choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts of each token, [tokens, top_k]."""
        logits = self.router.with_bias(rows)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        weights, choices = torch.softmax(wide, dim=-1).topk(self.spec.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, choices

    def _run(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the outputs of rows that lie expert by expert."""
        return torch.cat([self._expert(part, index) for index, part in enumerate(rows.split(counts))])

    def _expert(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        def run(weight: nn.Parameter, inputs: torch.Tensor) -> torch.Tensor:
            sink = getattr(weight, "sink", None)
            return product(inputs, weight[index], None if sink is None else sink.part(index))

        return run(self.down, self.activation(run(self.gate, rows)) * run(self.up, rows))

    def _run_afar(self, rows: torch.Tensor, route: _Route) -> torch.Tensor:
        """Return the outputs of rows whose experts the ranks of the ep group hold."""
        ep = self.mesh.ep
        here = route.counts.view(ep.degree, -1)
        there = torch.empty_like(here)
        with self.mesh.clock.on("ep"):
            dist.all_to_all_single(there, here, group=ep.group)
        sent, received = here.sum(1).tolist(), there.sum(1).tolist()
        arrived = exchange(rows, sent, received, self.mesh)
        by_expert = _regrouped(there.tolist()).to(rows.device)
        done = self._run(arrived[by_expert], there.sum(0).tolist())
        in_order = torch.empty_like(done).index_copy(0, by_expert, done)
        return exchange(in_order, received, sent, self.mesh)


def _regrouped(counts: list[list[int]]) -> torch.Tensor:
    """Return the order that turns rows by (sender, expert) into rows by (expert, sender)."""
    flat = [0, *itertools.accumulate(count for row in counts for count in row)]
    num = len(counts[0])
    pieces = [
        torch.arange(flat[sender * num + expert], flat[sender * num + expert + 1])
        for expert in range(num)
        for sender in range(len(counts))
    ]
    return torch.cat(pieces)
