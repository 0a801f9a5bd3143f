"""The best cut of a pattern is the best of all cuts."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pattern_samples as samples
from hypothesis import event, given
from hypothesis import strategies as st

from hetplan.plan.timing import Durations
from hetplan.search.columns import make_columns
from hetplan.search.cuts import best_cuts, stage_meshes
from hetplan.search.patterns import enumerate_patterns
from hetplan.search.problem import build_tables

TRIES = 25


def busiest_s(problem, tables, places):
    """Return the seconds of the busiest stage when each runs in its fastest mode that fits, or None."""
    decoders = [layer.kind == "decoder" for layer in problem.prices.model.chain]
    worst = 0.0
    for s, (m, first, end, held) in enumerate(places):
        count = sum(decoders[first:end])
        pinned = problem.limits.pinned_layers
        if count < problem.limits.min_decoder_layers or (pinned is not None and count != pinned[s]):
            return None
        fits = tables.fixed_mrll[m, :, first, end] + held * tables.flight_mrll[m, :, first, end] <= 1.0
        seconds = (tables.forward_mrl + tables.backward_mrl)[m, :, first:end].sum(axis=1)
        if not fits.any() or not np.isfinite(seconds[fits]).any():
            return None
        worst = max(worst, float(seconds[fits].min()))
    return worst


def least_busiest_s(problem, tables, meshes, held):
    """Return the least busiest stage over all cuts (infinite where none fits)."""
    num = len(meshes)
    least = np.inf
    for inner in combinations(range(1, problem.num_layers), num - 1):
        spans = pairwise([0, *inner, problem.num_layers])
        places = [(m, a, b, min(held, num - s)) for s, (m, (a, b)) in enumerate(zip(meshes, spans, strict=True))]
        found = busiest_s(problem, tables, places)
        least = least if found is None else min(least, found)
    return least


def with_cut_limits(problem, dice):
    """Return the problem with a random demand on decoder layers."""
    decoders = sum(layer.kind == "decoder" for layer in problem.prices.model.chain)
    match dice.randrange(4):
        case 0:
            inner = sorted(dice.choices(range(decoders + 1), k=dice.randint(0, 2)))
            pinned = tuple(b - a for a, b in pairwise([0, *inner, decoders]))
            return replace(problem, limits=replace(problem.limits, pinned_layers=pinned))
        case 1:
            return replace(problem, limits=replace(problem.limits, min_decoder_layers=dice.randint(1, 2)))
        case _:
            return problem


@samples.many(120)
@given(instance=samples.instances(), seed=st.integers(0, 10**6))
def test_best_cut_is_that_of_trying_every_one(instance, seed):
    dice = random.Random(seed)
    problem = with_cut_limits(samples.problem_of(instance), dice)
    if not problem.microbatches:
        return
    sharding, degree = dice.choice(problem.limits.sharding), dice.choice([1, 2, 1 << 20])
    tables = build_tables(problem, dice.choice(problem.microbatches), sharding, degree)
    if tables is None:
        return
    patterns = enumerate_patterns(problem, tables)
    if not len(patterns):
        return
    rows = np.array(dice.choices(range(len(patterns)), k=TRIES))
    some, held = patterns.take(rows), dice.choice([1, 2, 4, problem.num_layers])
    cuts, meshes = best_cuts(problem, tables, some, held), stage_meshes(some)
    columns = make_columns(problem, tables, some, held)
    fitting = 0
    for row, column in enumerate(columns):
        num = int(some.stages[row])
        least_s = least_busiest_s(problem, tables, meshes[row, :num].tolist(), held)
        assert np.isfinite(least_s) == (column is not None), (some.mesh[row], some.count[row])
        if column is None:
            continue
        fitting += 1
        index = {mesh: m for m, mesh in enumerate(problem.meshes)}
        places = [
            (index[stage.mesh], stage.first_layer, stage.end_layer, min(held, num - s))
            for s, stage in enumerate(column.stages)
        ]
        found_s = busiest_s(problem, tables, places)
        assert cuts.least_tau_s[row] <= least_s * (1 + 1e-9)
        assert found_s is not None
        assert least_s * (1 - 1e-9) <= found_s <= least_s * (1 + 1e-3), (
            found_s / least_s,
            cuts.least_tau_s[row] / least_s,
        )
        taken_s = max(f + b for f, b in stage_seconds(column.durations))
        assert taken_s <= found_s * (1 + 1e-9)
    event(f"{fitting // 10 * 10}+ cuts")


def stage_seconds(durations: Durations):
    return zip(durations.forward_s, durations.backward_s, strict=True)
