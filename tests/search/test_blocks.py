"""Bounds over all cuts of a pattern: never above what a plan with any cut takes, and nothing is left out."""

import random
from itertools import combinations

import numpy as np
import pattern_samples as samples
from hypothesis import event, given
from hypothesis import strategies as st

from hetplan.plan.timing import Durations, pipeline_finish
from hetplan.search.after import Ending
from hetplan.search.blocks import BlockBounder, Shapes
from hetplan.search.book import Book
from hetplan.search.columns import column_of, finished
from hetplan.search.every_cut import EveryCut
from hetplan.search.patterned import PatternSearch
from hetplan.search.pipelines import ends_s
from hetplan.search.problem import MANY_RANKS
from hetplan.search.records import SearchRequest
from hetplan.search.recut import Recut

TRIES = 30


@samples.many(15)
@given(p=st.integers(1, 12), m=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_pipelines_side_by_side_end_when_each_does_alone(p, m, seed):
    dice = np.random.default_rng(seed)
    forward, backward, p2p = dice.random((3, p)), 2 * dice.random((3, p)), dice.random((3, p - 1)) * 0.3
    found = ends_s(forward, backward, p2p, m)
    for n in range(3):
        durations = Durations(
            forward_s=tuple(forward[n]), backward_s=tuple(backward[n]), weight_s=(0.0,) * p, p2p_s=tuple(p2p[n])
        )
        np.testing.assert_allclose(found[n], pipeline_finish("1f1b", p, m, 1, durations).rank_s, rtol=1e-12)


def level_of(copies):
    return 1 << (max(copies // 2, 1).bit_length() - 1)


def bounder_of(search, field, level):
    tables = search.tables(field.tables.microbatch, field.sharding, MANY_RANKS, level) or field.tables
    return BlockBounder(search.problem, tables, Ending(search.problem, field.sharding, level))


def shapes_of(field, row, count, limit_s):
    k = int((field.patterns.count[row] > 0).sum())
    return Shapes(
        mesh=field.patterns.mesh[row : row + 1, :k],
        count=field.patterns.count[row : row + 1, :k],
        comm_s=field.patterns.comm_s[row : row + 1],
        num_microbatches=np.array([count]),
        limit_s=np.array([limit_s]),
    )


@samples.many(25)
@given(instance=samples.instances(max_devices=20, max_decoders=12), seed=st.integers(0, 10**6))
def test_no_cut_is_faster_than_the_bound_of_its_blocks(instance, seed):
    prices, limits = instance
    problem = samples.problem_of(instance)
    dice = random.Random(seed)
    search = PatternSearch(problem, Book(problem, SearchRequest(limits=limits)))
    tried = 0
    for field in search.fields():
        for row in dice.choices(range(len(field.patterns)), k=TRIES) if len(field.patterns) else ():
            most = int(field.copies[row])
            layout = samples.random_layout(dice, problem, field.tables, field.patterns, row, most) if most else None
            for placed, found in samples.priced(prices, limits, layout) if layout else ():
                copies = sum(replica.copies for replica in placed.replicas)
                count = -(-(problem.batch // field.tables.microbatch) // copies)
                bounder = bounder_of(search, field, level_of(copies))
                loose = bounder.bounds(shapes_of(field, row, count, np.inf)).step_s[0]
                tight = bounder.bounds(shapes_of(field, row, count, found.step_s * 1.5)).step_s[0]
                assert loose <= found.step_s * (1 + 1e-9), placed
                assert tight <= found.step_s * (1 + 1e-9), placed
                assert tight >= min(loose, found.step_s * 1.5) * (1 - 1e-9)
                tried += 1
    event(f"{min(tried, 100) // 20 * 20}+ plans")


@samples.many(15)
@given(instance=samples.instances(max_devices=12, max_decoders=6), seed=st.integers(0, 10**6))
def test_the_cuts_that_are_listed_hold_the_best_one(instance, seed):
    _, limits = instance
    problem = samples.problem_of(instance)
    dice = random.Random(seed)
    search = PatternSearch(problem, Book(problem, SearchRequest(limits=limits)))
    for field in search.fields():
        rows = [r for r in range(len(field.patterns)) if 2 <= field.patterns.stages[r] <= min(5, problem.num_layers)]
        for row in dice.sample(rows, min(4, len(rows))):
            copies = max(1, int(field.copies[row]))
            count = -(-(problem.batch // field.tables.microbatch or 1) // copies)
            tables = search.tables(field.tables.microbatch, field.sharding, MANY_RANKS, level_of(copies))
            ending = Ending(problem, field.sharding, level_of(copies))
            mesh_p = np.repeat(field.patterns.mesh[row], field.patterns.count[row])
            recut = Recut(problem, tables, mesh_p, count, ending)
            inner = combinations(range(1, problem.num_layers), len(mesh_p) - 1)
            cuts = np.array([[*ends, problem.num_layers] for ends in inner])
            best_s, _ = recut.least_of(cuts, np.inf, proved=True)
            if not np.isfinite(best_s):
                continue
            limit_s = best_s * dice.choice([0.999, 1.001, 1.1])
            divisions = bounder_of(search, field, level_of(copies)).divisions_below(
                shapes_of(field, row, count, limit_s)
            )
            comm_s = float(field.patterns.comm_s[row])
            listed = EveryCut(problem, tables, mesh_p, (count, comm_s), ending).below(divisions, limit_s)
            assert listed is not None
            assert recut.least_of(listed, limit_s, proved=True)[0] == min(best_s, limit_s)


@samples.many(15)
@given(instance=samples.instances(max_devices=12, max_decoders=6), seed=st.integers(0, 10**6))
def test_a_cut_is_timed_as_its_column_is(instance, seed):
    _, limits = instance
    problem = samples.problem_of(instance)
    dice = random.Random(seed)
    search = PatternSearch(problem, Book(problem, SearchRequest(limits=limits)))
    for field in search.fields():
        rows = [r for r in range(len(field.patterns)) if field.patterns.stages[r] <= problem.num_layers]
        for row in dice.sample(rows, min(4, len(rows))):
            copies = max(1, int(field.copies[row]))
            tables = search.tables(field.tables.microbatch, field.sharding, copies, copies)
            ending = Ending(problem, field.sharding, copies, copies)
            mesh_p = np.repeat(field.patterns.mesh[row], field.patterns.count[row])
            recut = Recut(problem, tables, mesh_p, dice.randint(1, 9), ending)
            inner = sorted(dice.sample(range(1, problem.num_layers), len(mesh_p) - 1))
            start = np.array([[*inner, problem.num_layers]])
            places = recut.best(start)
            if places is None:
                continue
            column = finished(problem, column_of(problem, tables, places, "1f1b"), ending)
            ends = np.array([[end for _, (_, end), _ in places]])
            count = recut.num_microbatches
            np.testing.assert_allclose(recut.least_of(ends, np.inf)[0], column.step_s(count), rtol=1e-9)
            assert recut.least_of(start, np.inf)[0] >= column.step_s(count) * (1 - 1e-9)
