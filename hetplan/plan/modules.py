"""A layout of a model whose modules have grids of their own, and the rules it keeps.

A *placement* puts a *unit* (modules that always run together, a projector with its encoder) on `tp x cp x pp x dp`
ranks from `first_rank` on, tp fastest, then cp, dp and pp, on devices of one group. Units either have ranks of their
own or share all of them (*colocated*). All units see the same global microbatches: each divides the `samples` of one
over its own `dp`, so between units with different grids samples are dealt out anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from hetplan.costs.samples import is_language
from hetplan.plan.rules import Violation
from hetplan.plan.rules_model import degree_errors
from hetplan.specs.cluster import Cluster
from hetplan.specs.model import Model
from hetplan.specs.workload import Recompute, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One unit on its ranks."""

    modules: tuple[str, ...]
    group: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    first_rank: int = 0
    recompute: Recompute = "none"
    repeated: tuple[str, ...] = ()
    """Modules that every rank of a tp group runs whole, as engines do with encoders they do not split."""
    cut: tuple[int, ...] = ()
    """Layers of each stage, embeddings and heads counted; empty: the best cut."""

    def tp_of(self, module: str) -> int:
        """Return over how many ranks a module is split."""
        return 1 if module in self.repeated else self.tp

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Modules with the tp each is split by."""
        return tuple((module, self.tp_of(module)) for module in self.modules)

    @property
    def num_ranks(self) -> int:
        """Ranks of the grid."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def end_rank(self) -> int:
        """One past the last rank."""
        return self.first_rank + self.num_ranks

    @property
    def name(self) -> str:
        """How messages name the unit."""
        return "+".join(self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """Placements of all modules, in the order data flows, and how the batch is divided."""

    placements: tuple[Placement, ...]
    num_microbatches: int
    samples: int
    """Samples of one global microbatch."""
    sharding: Sharding = "optimizer"

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return max(placement.end_rank for placement in self.placements)

    @property
    def num_samples(self) -> int:
        """The global batch."""
        return self.num_microbatches * self.samples


def units_of(model: Model) -> tuple[tuple[str, ...], ...]:
    """Return modules that always run together: a projector joins the encoder before it, else the module behind it."""
    units: list[list[str]] = []
    for module in model.modules:
        alone = any(layer.kind != "projector" for layer in module.layers)
        before = [sender for sender, receiver in model.edges if receiver == module.name]
        home = next((unit for unit in units if before and before[-1] in unit), None)
        if alone or home is None:
            units.append([module.name])
        else:
            home.append(module.name)
    return tuple(tuple(unit) for unit in units)


def unit_edges(model: Model, units: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, int], ...]:
    """Return (sender, receiver) pairs of units, by their places."""
    place = {name: u for u, unit in enumerate(units) for name in unit}
    pairs = {(place[sender], place[receiver]) for sender, receiver in model.edges}
    return tuple(sorted((a, b) for a, b in pairs if a != b))


def check_modules(layout: ModuleLayout, model: Model, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules a layout breaks (empty: none); memory is the estimate's to say."""
    return (*_covers(layout, model), *_fits_ranks(layout, cluster), *_divides(layout, model))


def _covers(layout: ModuleLayout, model: Model) -> Iterator[Violation]:
    """Every module is placed once, in the order data flows."""
    placed = [name for placement in layout.placements for name in placement.modules]
    wanted = [module.name for module in model.modules]
    if sorted(placed) != sorted(wanted):
        missing = sorted(set(wanted) - set(placed)) or sorted(set(placed) - set(wanted)) or placed
        message = f"every module is placed exactly once; look at {', '.join(missing)}"
        yield Violation(rule="every module once", where="", message=message, unpriceable=True)


def _fits_ranks(layout: ModuleLayout, cluster: Cluster) -> Iterator[Violation]:
    """Units share all ranks or none, and no group is asked for more devices than it has."""
    for first, second in combinations(layout.placements, 2):
        same = (first.first_rank, first.end_rank, first.group) == (second.first_rank, second.end_rank, second.group)
        apart = first.end_rank <= second.first_rank or second.end_rank <= first.first_rank
        if not (same or apart):
            yield Violation(
                rule="ranks apart or shared",
                where=second.name,
                message=f"its ranks {second.first_rank}-{second.end_rank - 1} overlap ranks "
                f"{first.first_rank}-{first.end_rank - 1} of {first.name}; units share all ranks or none",
            )
    spans = {(placement.group, placement.first_rank, placement.end_rank) for placement in layout.placements}
    for name in sorted({group for group, _, _ in spans}):
        used = sum(end - first for group, first, end in spans if group == name)
        there = cluster.group(name).num_devices
        if used > there:
            message = f"{used} ranks on group {name!r}, which has {there} devices"
            yield Violation(rule="devices of a group", where="", message=message)


def _divides(layout: ModuleLayout, model: Model) -> Iterator[Violation]:
    """Degrees divide heads and widths, stages have layers, and every dp divides the global microbatch."""
    for placement in layout.placements:
        modules = [module for module in model.modules if module.name in placement.modules]
        for module in modules:
            alone = Model(name=module.name, modules=(module,))
            for message in degree_errors(alone, tp=placement.tp_of(module.name)):
                yield Violation(rule="degrees divide the model", where=placement.name, message=message)
        layers = sum(len(module.layers) for module in modules)
        if placement.pp > layers:
            message = f"pp {placement.pp} is more than its {layers} layers"
            yield Violation(rule="stages have layers", where=placement.name, message=message)
        if placement.cut and (len(placement.cut) != placement.pp or sum(placement.cut) != layers):
            message = f"the cut {'+'.join(map(str, placement.cut))} is not {placement.pp} stages of {layers} layers"
            yield Violation(rule="the cut holds all layers", where=placement.name, message=message)
        if layout.samples % placement.dp:
            kind = "language dp" if any(is_language(module) for module in modules) else "dp"
            message = f"a global microbatch of {layout.samples} samples is not divisible by its {kind} {placement.dp}"
            yield Violation(rule="dp divides the microbatch", where=placement.name, message=message)
