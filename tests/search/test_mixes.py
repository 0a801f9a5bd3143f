"""CP-SAT's mixes meet batch, devices and domains exactly, and there is one whenever trying all finds one."""

from dataclasses import replace
from itertools import product

import numpy as np
import tiny
from hypothesis import event, given
from hypothesis import strategies as st
from pattern_samples import many

from hetplan.costs.prices import price
from hetplan.plan.limits import Limits
from hetplan.plan.placement import place, places_of
from hetplan.plan.timing import Durations
from hetplan.search.columns import Column, ColumnStage
from hetplan.search.layouts import layout_of
from hetplan.search.mixes import choices_within, solve_mix
from hetplan.search.problem import build_problem
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.workload import Workload

EFFORT = 5.0


@st.composite
def problems(draw):
    """A problem with one to three groups of small nodes, some of them with devices left out."""
    groups = []
    for kind in range(draw(st.integers(1, 3))):
        per_node, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        left_out = frozenset({(0, 0)} if per_node * nodes > 1 and draw(st.booleans()) else ())
        groups.append(
            Group(
                name=f"g{kind}",
                device=tiny.device(f"D{kind}", 1e14),
                nodes=tuple(f"g{kind}-{i}" for i in range(nodes)),
                devices_per_node=per_node,
                site="s",
                usable_memory_bytes=1e12,
                left_out=left_out,
            )
        )
    cluster = Cluster(name="c", groups=tuple(groups), networks=())
    workload = Workload(seq_len=512, global_batch=draw(st.integers(1, 30)))
    limits = Limits(tp=None, max_shapes=draw(st.sampled_from([None, None, 1, 2])))
    return build_problem(price(cluster, tiny.llama_like(2, width=1024), workload), limits)


@st.composite
def columns(draw, problem):
    """A column of one to three stages on random meshes of the problem, with random seconds."""
    meshes = draw(st.lists(st.sampled_from(problem.meshes), min_size=1, max_size=3))
    used = [0] * len(problem.devices_g)
    for mesh in meshes:
        used[mesh.group] += mesh.size
    seconds = tuple(draw(st.sampled_from([0.1, 0.25, 0.5, 1.0])) for _ in meshes)
    durations = Durations(
        forward_s=seconds, backward_s=seconds, weight_s=(0.0,) * len(meshes), p2p_s=(0.0,) * (len(meshes) - 1)
    )
    stages = tuple(ColumnStage(mesh=m, first_layer=0, end_layer=1, recompute="none") for m in meshes)
    size = draw(st.sampled_from([1, 2, 4]))
    return Column(stages=stages, microbatch=size, sharding="none", used_g=tuple(used), durations=durations)


@st.composite
def tasks(draw):
    problem = draw(problems())
    found = draw(st.lists(columns(problem), min_size=1, max_size=3))
    return problem, found, draw(st.floats(0.2, 12.0))


def room_of(problem, group, tp):
    """Return how many tp groups the domains of a group hold."""
    _, sizes = np.unique(places_of(problem.prices)[group].domain_d, return_counts=True)
    return int((sizes // tp).sum())


def fits(problem, columns, rows):
    """Return whether (column, microbatches, copies) rows obey devices and, for each tp and wider, domains."""
    used = np.sum([np.array(columns[j].used_g) * copies for j, _, copies in rows], axis=0)
    if np.any(used > np.array(problem.devices_g)):
        return False
    for group in problem.prices.cluster.groups:
        for tp in {stage.mesh.tp for column in columns for stage in column.stages} - {1}:
            wide = sum(
                copies * sum(s.mesh.name == group.name and s.mesh.tp >= tp for s in columns[j].stages)
                for j, _, copies in rows
            )
            if wide > room_of(problem, group.name, tp):
                return False
    return True


def least_rows(problem, columns, limit_s):
    """Return the fewest (column, count) rows that meet the batch within the limit, by trying all; None: impossible."""
    singles = []
    for j, column in enumerate(columns):
        most = column.most_microbatches(limit_s)
        room = min(d // u for d, u in zip(problem.devices_g, column.used_g, strict=True) if u)
        counts = range(1, min(most, problem.batch // column.microbatch) + 1)
        singles += [(j, m, c) for m, c in product(counts, range(1, room + 1))]
    best = None
    for number in range(1, min(len(singles), problem.limits.max_shapes or 3, 3) + 1):
        for rows in product(singles, repeat=number):
            if sum(m * c * columns[j].microbatch for j, m, c in rows) == problem.batch and fits(problem, columns, rows):
                best = number
                break
        if best:
            return best
    return None


@many(150)
@given(task=tasks())
def test_mixes_meet_batch_devices_and_domains(task):
    problem, found, limit_s = task
    choices = choices_within(problem, found, [limit_s] * len(found))
    answer = solve_mix(problem, found, choices, EFFORT, seed=0)
    rows = answer.rows if answer else ()
    event("a mix" if rows else "none")
    if not rows:
        return
    assert sum(count * copies * found[j].microbatch for j, count, copies in rows) == problem.batch
    assert fits(problem, found, rows)
    assert all(found[j].step_s(count) <= limit_s * (1 + 1e-9) for j, count, _ in rows)
    assert problem.limits.max_shapes is None or len(rows) <= problem.limits.max_shapes
    layout = layout_of([(found[j], count, copies) for j, count, copies in rows])
    assert layout.num_samples == problem.batch
    place(layout, problem.prices.cluster)


def small(problem):
    return sum(problem.devices_g) <= 8 and problem.batch <= 8


@many(150)
@given(task=tasks().filter(lambda task: small(task[0]) or task[0].batch <= 5))
def test_a_mix_is_found_whenever_there_is_one(task):
    problem, found, limit_s = task
    problem = replace(problem, limits=replace(problem.limits, max_shapes=min(problem.limits.max_shapes or 2, 2)))
    choices = choices_within(problem, found, [limit_s] * len(found))
    answer = solve_mix(problem, found, choices, EFFORT, seed=0)
    rows = answer.rows if answer else ()
    expected = least_rows(problem, found, limit_s)
    event(f"{expected} rows")
    assert len(rows) == (expected or 0)
