"""Random instances for the pattern search, and random valid plans of its patterns: what bounds are held against."""

import math
import random
from dataclasses import replace
from itertools import groupby

import numpy as np
import tiny
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hetplan.costs.prices import price
from hetplan.errors import UsageError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.problem import MANY_RANKS, build_problem, build_tables
from hetplan.specs.workload import Workload


def many(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@st.composite
def instances(draw, min_devices=2, max_devices=16, max_decoders=7):
    """A cost model and limits on one to three device types; 1F1B, as the pattern search builds it."""
    num_devices = draw(st.integers(min_devices, max_devices))
    num_types = draw(st.integers(1, min(3, num_devices)))
    width = draw(st.sampled_from([1024, 2048, 4096]))
    num_experts = draw(st.sampled_from([0, 0, 0, 4]))
    num_decoders = draw(st.integers(1, max_decoders))
    if num_experts:
        model = tiny.mixture(num_decoders, num_experts=num_experts, width=width)
    else:
        model = tiny.llama_like(num_decoders, width=width, tied=draw(st.booleans()))
    workload = Workload(seq_len=draw(st.sampled_from([512, 2048, 4096])), global_batch=draw(st.integers(1, 24)))
    cluster = tiny.cluster(draw, num_devices, num_types)
    speeds = st.sampled_from([0.02, 0.2, 1.0])
    cluster = replace(cluster, groups=tuple(replace(group, speed=draw(speeds)) for group in cluster.groups))
    limits = Limits(
        tp=draw(st.sampled_from([(1,), (1, 2), None])),
        ep=None if num_experts else (1,),
        stage_dp=draw(st.sampled_from([(1,), (1,), (1, 2)])),
        microbatch=draw(st.sampled_from([(1,), (2,), (1, 2), None])),
        recompute=draw(st.sampled_from(tiny.RECOMPUTES)),
        sharding=draw(st.sampled_from(tiny.SHARDINGS)),
        min_decoder_layers=draw(st.sampled_from([0, 0, 0, 1])),
        max_shapes=draw(st.sampled_from([None, None, 1])),
    )
    return price(cluster, model, workload), limits


def problem_of(instance):
    prices, limits = instance
    return build_problem(prices, limits)


def bound_tables(problem, sharding, ranks=1):
    """Return the tables of every microbatch size that bounds are made of."""
    moving = ranks if sharding in ("gradients", "full") else 1
    found = (build_tables(problem, size, sharding, MANY_RANKS, moving) for size in problem.microbatches)
    return [tables for tables in found if tables is not None and tables.usable_m.any()]


def random_stages(dice: random.Random, problem, patterns, row):
    """Return the stages of a pattern with a random cut and random recomputation, or None where none can be."""
    meshes = np.repeat(patterns.mesh[row], patterns.count[row]).tolist()
    if len(meshes) > problem.num_layers:
        return None
    inner = sorted(dice.sample(range(1, problem.num_layers), len(meshes) - 1))
    modes = problem.limits.recompute
    same = dice.choice(modes) if dice.random() < 0.5 else None
    return tuple(
        Stage(
            group=problem.meshes[m].name,
            first_layer=first,
            end_layer=end,
            tp=problem.meshes[m].tp,
            cp=problem.meshes[m].cp,
            dp=problem.meshes[m].dp,
            ep=problem.meshes[m].ep,
            recompute=same or dice.choice(modes),
        )
        for m, first, end in zip(meshes, [0, *inner], [*inner, problem.num_layers], strict=True)
    )


def random_shares(dice: random.Random, parts, copies):
    """Return (microbatches, copies) rows that share `parts` microbatches over at most `copies` replicas."""
    copies = min(copies, parts)
    if dice.random() < 0.3:
        copies = dice.randint(1, copies)
    each, rest = divmod(parts, copies)
    rows = [(each + 1, rest), (each, copies - rest)] if rest else [(each, copies)]
    if len(rows) == 1 and copies > 2 and each > 1 and dice.random() < 0.2:
        rows = [(each + 1, 1), (each, copies - 2), (each - 1, 1)]
    return rows


def priced(prices, limits, layout):
    """Yield the estimates of a layout in both ways to place it, where it is valid and its gradients can meet."""
    for order in ("stages", "pipelines"):
        try:
            placed = place(layout, prices.cluster, order)
        except UsageError:
            return
        if not check(placed, prices, limits) and math.isfinite((found := estimate(placed, prices)).step_s):
            yield placed, found


def random_layout(dice: random.Random, problem, tables, patterns, row, copies):
    """Return a plan of one shape of a pattern, valid or not, or None."""
    stages = random_stages(dice, problem, patterns, row)
    if stages is None or problem.batch % tables.microbatch:
        return None
    rows = random_shares(dice, problem.batch // tables.microbatch, copies)
    if len(rows) > 1 and problem.limits.max_shapes == 1:
        return None
    replicas = tuple(
        Replica(stages=stages, microbatch=tables.microbatch, num_microbatches=count, copies=some)
        for count, some in rows
    )
    return Layout(replicas=replicas, schedule="1f1b", sharding=tables.sharding)


def rows_of(problem, patterns, stages):
    """Return the rows of patterns whose replicas have these stages."""
    index = {(mesh.name, mesh.tp, mesh.cp, mesh.dp, mesh.ep): m for m, mesh in enumerate(problem.meshes)}
    meshes = [index[s.group, s.tp, s.cp, s.dp, s.ep] for s in stages]
    wanted = [(m, len(list(run))) for m, run in groupby(meshes)]
    row = np.array([wanted + [(-1, 0)] * (patterns.mesh.shape[1] - len(wanted))])
    same = np.all((patterns.mesh == row[:, :, 0]) & (patterns.count == row[:, :, 1]), axis=1)
    return np.flatnonzero(same)
