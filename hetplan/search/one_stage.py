"""Plans of one stage, data-parallel over groups that each have a tp degree of their own, all ranks with equal shares.

A group of n domains of d devices gives n floor(d / tp) ranks. With R ranks in all and microbatches of m samples the
batch B is shared equally where R m divides B; what does not divide is left out, as is a choice of less than whole
groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.book import Book
from hetplan.search.problem import Mesh, Problem

MOST_CHOICES = 4096
"""More choices of degrees than this are not tried."""


def price_one_stage(book: Book) -> None:
    """Put the plans of one stage and several degrees into the book."""
    book.enter("one stage")
    for layout in one_stage_layouts(book.problem):
        book.consider(layout)


def one_stage_layouts(problem: Problem) -> Iterator[Layout]:
    """Yield every layout of at least two groups with unlike tp degrees that shares the batch equally."""
    limits = problem.limits
    if (limits.pp is not None and 1 not in limits.pp) or limits.max_shapes == 1:
        return
    choices: list[list[Mesh | None]] = [[None] for _ in problem.devices_g]
    for mesh in problem.meshes:
        if mesh.cp == mesh.dp == mesh.ep == 1 and mesh.tp <= problem.domain_g[mesh.group]:
            choices[mesh.group].append(mesh)
    num = 1
    for own in choices:
        num *= len(own)
    if num > MOST_CHOICES:
        return
    for chosen in product(*choices):
        meshes = [mesh for mesh in chosen if mesh is not None]
        if len({mesh.tp for mesh in meshes}) > 1:
            yield from _layouts(problem, meshes)


def _layouts(problem: Problem, meshes: list[Mesh]) -> Iterator[Layout]:
    limits = problem.limits
    copies = [_ranks(problem, mesh) for mesh in meshes]
    ranks = sum(copies)
    if limits.replicas is not None and ranks not in limits.replicas:
        return
    for size, recompute, sharding in product(problem.microbatches, limits.recompute, limits.sharding):
        if problem.batch % (ranks * size):
            continue
        rows = tuple(
            Replica(
                stages=(
                    Stage(
                        group=mesh.name, first_layer=0, end_layer=problem.num_layers, tp=mesh.tp, recompute=recompute
                    ),
                ),
                microbatch=size,
                num_microbatches=problem.batch // (ranks * size),
                copies=count,
            )
            for mesh, count in zip(meshes, copies, strict=True)
        )
        yield Layout(replicas=rows, schedule="1f1b", sharding=sharding)


def _ranks(problem: Problem, mesh: Mesh) -> int:
    """Return how many meshes of a group there is room for."""
    domain = problem.domain_g[mesh.group]
    return problem.devices_g[mesh.group] // domain * (domain // mesh.tp)
