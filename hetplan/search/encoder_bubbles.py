"""What placing the encoder into the language model's bubbles is worth, on one grid for all ranks.

Two layouts of the same job on the same grid (tp, pp, vpp, dp) are priced: *joint*, the chain of all modules cut into
virtual stages of about equal seconds, and *filled*, the language model alone cut so and the encoder, split by the same
tp, laid over `pieces` ranks of each pipeline and worked on in idle time (see `search.bubble_fill`). Of the numbers of
pieces that divide pp the one with the shortest step is taken, the one with least memory among equals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.balance.segments import balanced_cut
from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders, LayerCosts, StageOption
from hetplan.costs.samples import is_language
from hetplan.errors import UsageError
from hetplan.plan.idle import Cause, Pipeline, bubbles_by_cause, step_of, timeline
from hetplan.plan.program import held, program
from hetplan.plan.timing import Durations
from hetplan.search.bubble_fill import EncoderWork, FillPlan, fill_bubbles
from hetplan.specs.workload import Recompute

EQUAL = 1 + 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks of the job and what a microbatch is."""

    group: str
    tp: int
    pp: int
    dp: int
    vpp: int = 1
    microbatch: int = 1
    recompute: Recompute = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleResult:
    """Both layouts side by side."""

    joint_s: float
    filled_s: float
    language_s: float
    """The language model's step alone: what `filled_s` comes near to when everything fits."""
    bubbles: Mapping[Cause, float]
    """Of the joint layout, as parts of its step."""
    plan: FillPlan
    pieces: int
    joint_bytes: float
    filled_bytes: float
    """Peak of the fullest rank: states and activations."""

    @property
    def gain(self) -> float:
        """Part of the joint step that is saved."""
        return 1.0 - self.filled_s / self.joint_s

    @property
    def memory_overhead(self) -> float:
        """How much more memory the fullest rank takes."""
        return self.filled_bytes / self.joint_bytes - 1.0


def encoder_in_bubbles(prices: Prices, grid: Grid) -> BubbleResult:
    """Return what the bubbles are worth.

    Raises:
        UsageError: the modules are not encoders followed by one language model, or counts do not divide.
    """
    job = _Job(prices, grid)
    joint, alone = job.pipeline(0), job.pipeline(job.num_encoder)
    found: list[tuple[float, float, int, FillPlan]] = []
    for pieces in (p for p in range(1, grid.pp + 1) if grid.pp % p == 0):
        plan = fill_bubbles(alone, job.encoder(pieces))
        found.append((plan.step_s, job.filled_bytes(alone, plan, pieces), pieces, plan))
    least_s = min(step_s for step_s, *_ in found)
    step_s, num_bytes, pieces, plan = min((one for one in found if one[0] <= least_s * EQUAL), key=lambda one: one[1])
    return BubbleResult(
        joint_s=step_of(joint, timeline(joint.order, joint.durations)),
        filled_s=step_s,
        language_s=step_of(alone, timeline(alone.order, alone.durations)),
        bubbles=bubbles_by_cause(joint),
        plan=plan,
        pieces=pieces,
        joint_bytes=job.pipeline_bytes(joint, 0),
        filled_bytes=num_bytes,
    )


class _Job:
    """Costs of the chain on the grid."""

    def __init__(self, prices: Prices, grid: Grid) -> None:
        modules = prices.model.modules
        if len(modules) < 2 or not is_language(modules[-1]) or any(is_language(module) for module in modules[:-1]):
            raise UsageError("bubbles are filled where encoders stand before one language model")
        self._prices = prices
        self._grid = grid
        self._option = StageOption(group=grid.group, tp=grid.tp, samples=grid.microbatch, recompute=grid.recompute)
        self._costs: LayerCosts = prices.layers(self._option)
        self.num_encoder = sum(len(module.layers) for module in modules[:-1])
        batch = prices.workload.global_batch
        if batch % (grid.dp * grid.microbatch):
            raise UsageError(
                f"a batch of {batch} does not divide into dp {grid.dp} x microbatches of {grid.microbatch}"
            )
        self._microbatches = batch // (grid.dp * grid.microbatch)
        self._cuts: dict[int, list[int]] = {}

    def pipeline(self, first: int) -> Pipeline:
        """Return the pipeline of the layers from `first` on."""
        grid, costs = self._grid, self._costs
        seconds_l = (costs.forward_total_s + costs.backward_total_s)[first:]
        cut = [first + end for end in balanced_cut(seconds_l, grid.pp * grid.vpp)]
        self._cuts[first] = cut
        forward, backward = (self._sums(cut, each) for each in (costs.forward_total_s, costs.backward_total_s))
        talk = [self._sums(cut, each) for each in (costs.tp_forward_s, costs.tp_backward_s)]
        params_v = np.array(self._sums(cut, costs.params))
        most = max(float(params_v[rank :: grid.pp].sum()) for rank in range(grid.pp))
        holder = Holders(group=grid.group, num_ranks=grid.dp, ranks_per_node=1, tp=grid.tp)
        cost = self._prices.sync(most * grid.tp, (holder,), "optimizer")
        return Pipeline(
            order=program("interleaved" if grid.vpp > 1 else "1f1b", grid.pp, self._microbatches, grid.vpp),
            durations=Durations(
                forward_s=tuple(forward),
                backward_s=tuple(backward),
                weight_s=(0.0,) * len(forward),
                p2p_s=(self._transfer_s(),) * (len(forward) - 1),
            ),
            tp_forward=tuple(part / whole for part, whole in zip(talk[0], forward, strict=True)),
            tp_backward=tuple(part / whole for part, whole in zip(talk[1], backward, strict=True)),
            gather_s=cost.gather_s,
            reduce_s=cost.reduce_s,
        )

    def encoder(self, pieces: int) -> EncoderWork:
        """Return the encoder's work for one microbatch."""
        end = self.num_encoder
        return EncoderWork(
            forward_s=float(self._costs.forward_total_s[:end].sum()),
            backward_s=float(self._costs.backward_total_s[:end].sum()),
            pieces=pieces,
            transfer_s=self._transfer_s(),
        )

    def pipeline_bytes(self, pipeline: Pipeline, first: int) -> float:
        """Return the peak of the fullest rank of a pipeline."""
        saved_v = np.array(self._sums(self._cuts[first], self._costs.saved_bytes))
        logits = float(self._costs.logits_bytes.max())
        peaks = []
        for rank, moments in enumerate(held(pipeline.order)):
            own_v = saved_v[rank :: self._grid.pp]
            last = logits if rank == self._grid.pp - 1 else 0.0
            activations = max(float(np.dot(counts, own_v)) for counts in moments)
            peaks.append(self._states(self._cuts[first], rank) + activations + last)
        return max(peaks)

    def filled_bytes(self, pipeline: Pipeline, plan: FillPlan, pieces: int) -> float:
        """Return the peak with the encoder's states and activations on every rank."""
        end = self.num_encoder
        states = self._bytes_per_param() * float(self._costs.params[:end].sum()) / pieces
        saved = float(self._costs.saved_bytes[:end].sum()) / pieces
        begun: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(self._grid.pp)}
        for fill in plan.fills:
            begun[fill.rank].append((fill.start_s, 1) if fill.phase == "forward" else (fill.end_s, -1))
        most = 0
        for events in begun.values():
            counts = np.cumsum([sign for _, sign in sorted(events)])
            most = max(most, int(counts.max(initial=0)))
        return self.pipeline_bytes(pipeline, end) + states + most * saved

    def _states(self, cut: list[int], rank: int) -> float:
        params_v = np.array(self._sums(cut, self._costs.params))
        return self._bytes_per_param() * float(params_v[rank :: self._grid.pp].sum())

    def _bytes_per_param(self) -> float:
        workload = self._prices.workload
        return workload.weight_bytes + workload.gradient_bytes + workload.optimizer_bytes / self._grid.dp

    def _transfer_s(self) -> float:
        return self._prices.boundary_s(self._option, self._option, self.num_encoder, same_node=False)

    @staticmethod
    def _sums(cut: list[int], values_l: Floats) -> list[float]:
        return [float(values_l[first:end].sum()) for first, end in pairwise(cut)]
