"""How many copies of which column, each with how many microbatches: an integer program for CP-SAT.

Variables: x[c] copies of choice c = (column j, m_c microbatches); y[c] = 1 where x[c] > 0.

    sum_c microbatch_j m_c x[c]  =  global batch                         _meet_batch
    sum_c used_jg x[c]          <=  devices_g          for each group    _stay_within_devices
    sum over tp groups too wide to share a domain  <=  domains           _fit_domains
    y[c] <= x[c] <= most_c y[c],   sum_c y[c] <= max_shapes              _count_shapes

    minimise   sum_c y[c]                                                (fewest rows first)

Choices hold only microbatch counts whose pipeline ends within the step time asked for, so any solution meets it.
Feasibility is all that is asked of the solver; which step time to ask for is decided outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from hetplan.plan.placement import places_of
from hetplan.search.columns import Column
from hetplan.search.problem import Problem

FEWER_MICROBATCHES = 4
"""Counts below the largest possible one that a column may also run."""

EFFORT_DIGITS = 9
"""The solver adds up its deterministic time in an order that differs between processes: its last digits are noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A column with a microbatch count."""

    column: int
    num_microbatches: int
    samples: int
    most_copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixAnswer:
    """(column, microbatches, copies) for each row, and what the solver spent."""

    rows: tuple[tuple[int, int, int], ...]
    effort: float


def choices_within(problem: Problem, columns: Sequence[Column], limits_s: Sequence[float]) -> list[Choice]:
    """Return every column with the microbatch counts whose pipeline ends within its limit."""
    found: list[Choice] = []
    for j, column in enumerate(columns):
        most = column.most_microbatches(limits_s[j])
        room = min(
            (devices // used for devices, used in zip(problem.devices_g, column.used_g, strict=True) if used), default=0
        )
        exact = _dividing_counts(problem.batch // column.microbatch, most, room)
        counts = sorted({*range(max(1, most - FEWER_MICROBATCHES), most + 1), *exact}, reverse=True)
        for count in counts:
            samples = count * column.microbatch
            copies = min(room, problem.batch // samples)
            if 1 <= count <= most and copies:
                found.append(Choice(column=j, num_microbatches=count, samples=samples, most_copies=copies))
    return found


def _dividing_counts(microbatches: int, most: int, room: int) -> list[int]:
    """Return up to two counts that split `microbatches` evenly over at most `room` copies."""
    found = []
    for count in range(most, 0, -1):
        if microbatches % count == 0 and microbatches // count <= room:
            found.append(count)
            if len(found) == 2:
                break
        if microbatches // count > room:
            break
    return found


def solve_mix(
    problem: Problem, columns: Sequence[Column], choices: Sequence[Choice], effort: float, seed: int
) -> MixAnswer | None:
    """Return the mix with the fewest rows that meets the batch, or None where none was found within `effort`."""
    if not choices:
        return None
    model = cp_model.CpModel()
    copies = [model.new_int_var(0, choice.most_copies, f"copies[{c}]") for c, choice in enumerate(choices)]
    present = [model.new_bool_var(f"present[{c}]") for c in range(len(choices))]
    _meet_batch(model, problem, choices, copies)
    _stay_within_devices(model, problem, columns, choices, copies)
    _fit_domains(model, problem, columns, choices, copies)
    _count_shapes(model, problem, choices, (copies, present))
    model.minimize(sum(present))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is Python's: the best plan so far must be written
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    solver.parameters.linearization_level = 2
    status = solver.solve(model)
    spent = round(float(solver.response_proto.deterministic_time), EFFORT_DIGITS)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return MixAnswer(rows=(), effort=spent)
    rows = tuple(
        (choice.column, choice.num_microbatches, int(solver.value(copies[c])))
        for c, choice in enumerate(choices)
        if solver.value(copies[c])
    )
    return MixAnswer(rows=rows, effort=spent)


def _meet_batch(
    model: cp_model.CpModel, problem: Problem, choices: Sequence[Choice], copies: Sequence[cp_model.IntVar]
) -> None:
    model.add(sum(choice.samples * x for choice, x in zip(choices, copies, strict=True)) == problem.batch)


def _stay_within_devices(
    model: cp_model.CpModel,
    problem: Problem,
    columns: Sequence[Column],
    choices: Sequence[Choice],
    copies: Sequence[cp_model.IntVar],
) -> None:
    for g, devices in enumerate(problem.devices_g):
        used = [columns[choice.column].used_g[g] for choice in choices]
        if any(used):
            model.add(sum(u * x for u, x in zip(used, copies, strict=True) if u) <= devices)


def _fit_domains(
    model: cp_model.CpModel,
    problem: Problem,
    columns: Sequence[Column],
    choices: Sequence[Choice],
    copies: Sequence[cp_model.IntVar],
) -> None:
    """A domain of d devices holds floor(d / t) tp groups of at least t devices: a cut for each t that leaves a rest."""
    if not problem.limits.tp_within_node:
        return
    places = places_of(problem.prices)
    for g, group in enumerate(problem.prices.cluster.groups):
        _, sizes = np.unique(places[group.name].domain_d, return_counts=True)
        for tp in sorted({mesh.tp for mesh in problem.meshes if mesh.group == g and mesh.tp > 1}):
            held = int((sizes // tp).sum())
            if held * tp == problem.devices_g[g]:
                continue
            wide = [
                sum(s.mesh.cp * s.mesh.dp for s in columns[c.column].stages if s.mesh.group == g and s.mesh.tp >= tp)
                for c in choices
            ]
            if any(wide):
                model.add(sum(w * x for w, x in zip(wide, copies, strict=True) if w) <= held)


def _count_shapes(
    model: cp_model.CpModel,
    problem: Problem,
    choices: Sequence[Choice],
    variables: tuple[Sequence[cp_model.IntVar], Sequence[cp_model.IntVar]],
) -> None:
    copies, present = variables
    for choice, x, y in zip(choices, copies, present, strict=True):
        model.add(x <= choice.most_copies * y)
        model.add(x >= y)
    if problem.limits.max_shapes is not None:
        model.add(sum(present) <= problem.limits.max_shapes)
