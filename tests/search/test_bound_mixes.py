"""Bounds of plans with several replica shapes are never above what any valid mix takes."""

import random
from dataclasses import replace

import numpy as np
import pattern_samples as samples
from hypothesis import event, given
from hypothesis import strategies as st

from hetplan.plan.records import Layout, Replica
from hetplan.search.book import Book
from hetplan.search.bound import BoundSearch, Pool, device_seconds_s
from hetplan.search.patterned import PatternSearch
from hetplan.search.patterns import bound_lines, whole_layers_tau_s
from hetplan.search.records import SearchRequest

TRIES = 40


def random_mix(dice, problem, pools, sharding):
    """Return a layout of one to four replicas of random patterns that takes the batch exactly, or None."""
    free, left, rows = np.array(problem.devices_g), problem.batch, []
    for wanted in range(dice.randint(1, 4), 0, -1):
        pool = dice.choice(pools)
        size = pool.tables.microbatch
        fitting = np.flatnonzero(np.all(pool.patterns.used <= free, axis=1))
        if not len(fitting) or left < size:
            break
        row = int(dice.choice(fitting))
        stages = samples.random_stages(dice, problem, pool.patterns, row)
        most = left // size
        count = most if wanted == 1 else dice.randint(1, max(1, 2 * most // wanted))
        count = min(count, most)
        if stages is None:
            return None
        rows.append(Replica(stages=stages, microbatch=size, num_microbatches=count))
        free, left = free - pool.patterns.used[row], left - count * size
    if not left:
        return Layout(replicas=tuple(rows), schedule="1f1b", sharding=sharding)
    for number, row in enumerate(rows):
        if left % row.microbatch == 0:
            more = replace(row, num_microbatches=row.num_microbatches + left // row.microbatch)
            return Layout(replicas=(*rows[:number], more, *rows[number + 1 :]), schedule="1f1b", sharding=sharding)
    return None


def loosest_pools(search):
    """Return the pools whose linear program bounds mixes under every sharding."""
    return [Pool(t, search.patterns(t.microbatch, search.loosest, 1)) for t in search.bound_tables()]


def most_of_each_s(problem, pools, layout, step_s):
    """Hold every replica against the most microbatches its pattern can take within the step."""
    for replica in layout.replicas:
        pool = next(p for p in pools if p.tables.microbatch == replica.microbatch)
        (row,) = samples.rows_of(problem, pool.patterns, replica.stages).tolist()
        assert pool.samples(step_s)[row] >= replica.num_microbatches * replica.microbatch, replica
        lines = bound_lines(pool.patterns, pool.tables)
        assert lines.most_microbatches(step_s)[row] >= replica.num_microbatches, replica
        floor_s = whole_layers_tau_s(pool.patterns, pool.tables)[row]
        assert replica.num_microbatches * floor_s <= step_s * (1 + 1e-9), replica


@samples.many(60)
@given(instance=samples.instances(), seed=st.integers(0, 10**6))
def test_no_mix_is_faster_than_the_bounds(instance, seed):
    prices, limits = instance
    limits = replace(limits, max_shapes=None)
    problem = samples.problem_of((prices, limits))
    search = PatternSearch(problem, Book(problem, SearchRequest(limits=limits)))
    pools = loosest_pools(search)
    dice = random.Random(seed)
    seconds_s = device_seconds_s(problem, search.bound_tables())
    fastest_s, tried, shapes = np.inf, 0, 0
    for _ in range(TRIES if pools and any(len(pool.patterns) for pool in pools) else 0):
        layout = random_mix(dice, problem, pools, dice.choice(limits.sharding))
        for placed, found in samples.priced(prices, limits, layout) if layout else ():
            most_of_each_s(problem, pools, placed, found.step_s * (1 + 1e-9))
            fastest_s = min(fastest_s, found.step_s)
            tried, shapes = tried + 1, max(shapes, len(placed.replicas))
    event(f"{min(tried, 40) // 10 * 10}+ mixes, up to {shapes} rows")
    if np.isfinite(fastest_s):
        assert seconds_s <= fastest_s * (1 + 1e-9)
        for upper_s in (fastest_s * 1.0001, fastest_s * 3):
            least_s = BoundSearch(problem, pools).least_step_s(upper_s, seconds_s)
            assert least_s <= fastest_s * (1 + 1e-9)
