"""A layout under the other schedules a search may use.

Shapes are found and cut under 1F1B. GPipe and zero-bubble run the same stages in another order. Interleaving cuts
every stage into `vpp` parts: part c of all stages in turn makes the c-th pass through the pipeline, each rank keeping
the number of layers it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetplan.plan.program import schedule_errors
from hetplan.plan.records import Layout, Replica, ScheduleName

VPPS = (2, 3, 4)


def variants(layout: Layout, schedules: Sequence[ScheduleName]) -> Iterator[Layout]:
    """Yield the layout under each schedule that can run it."""
    for schedule in schedules:
        if schedule != "interleaved":
            yield replace(layout, schedule=schedule)
            continue
        for vpp in VPPS:
            rows = [_interleaved(row, vpp) for row in layout.replicas]
            if all(row is not None for row in rows):
                yield replace(layout, schedule=schedule, replicas=tuple(row for row in rows if row is not None))


def _interleaved(row: Replica, vpp: int) -> Replica | None:
    """Return a row with every stage cut into `vpp` parts, or None where the schedule or the layers do not allow it."""
    pp = len(row.stages)
    if row.vpp != 1 or pp == 1 or schedule_errors("interleaved", pp, row.num_microbatches, vpp):
        return None
    if any(stage.num_layers < vpp for stage in row.stages):
        return None
    stages = []
    first = 0
    for part in range(vpp):
        for stage in row.stages:
            share, rest = divmod(stage.num_layers, vpp)
            end = first + share + (part < rest)
            stages.append(replace(stage, first_layer=first, end_layer=end))
            first = end
    return replace(row, stages=tuple(stages), vpp=vpp)
