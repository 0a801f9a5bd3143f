"""All stages of a path in one model: for paths whose segmentations are too many to go through.

The constraints are those of `geo_segments` with every stage a segment of its own and every case open. Its bound is
weaker, and the effort ends it; what it proves and finds is taken where it is better.
"""

from __future__ import annotations

from hetplan.search.geo_cases import Case, Space, hops_least
from hetplan.search.geo_segments import Found, Outcome, Segmentation, best_of


def whole_search(space: Space, known: Found | None, effort: float) -> Outcome:
    """Return the best plan found, with a bound on all plans."""
    levels = space.levels
    anything = Case(
        lowest=levels[0],
        highest=levels[-1],
        components=(0,) * space.num_classes,
        allowed=None,
        stage=0,
    )
    ones = Segmentation(lengths=(1,) * space.num_stages, case=anything, below=None if known is None else known.value)
    found = best_of(space, ones, effort)
    floor = 2 * hops_least(space, anything, 1)
    value = known.value if found.best is None and known is not None else found.best.value if found.best else 0
    bound = float(value) if found.proved else max(found.bound, float(floor))
    return Outcome(best=found.best, proved=found.proved, effort=found.effort, bound=bound)
