"""Pipelines and expert groups kept inside switch segments: which segment's group a node belongs to.

With ``dp`` nodes side by side at each pipeline position and ``G`` segments, ranks ``0 .. dp / G - 1`` of every
position form the first segment's group, the next ``dp / G`` the second's:
``group(node) = (node % dp) // (dp // G)``. A pipeline then stays inside its segment. It works only where ``G`` divides
``dp``.
"""

from __future__ import annotations

from hetplan.errors import UsageError


def segment_group(node: int, dp: int, num_segments: int) -> int:
    """Return the segment whose group a node belongs to.

    Raises:
        UsageError: the segments do not divide the data-parallel degree.
    """
    return (node % dp) // _share(dp, num_segments)


def segment_groups(num_nodes: int, dp: int, num_segments: int) -> tuple[tuple[int, ...], ...]:
    """Return the nodes of every segment's group, in order.

    Raises:
        UsageError: the segments do not divide the data-parallel degree, or `dp` does not divide the nodes.
    """
    _share(dp, num_segments)
    if num_nodes % dp:
        raise UsageError(f"{num_nodes} nodes are no multiple of dp {dp}")
    groups: list[list[int]] = [[] for _ in range(num_segments)]
    for node in range(num_nodes):
        groups[segment_group(node, dp, num_segments)].append(node)
    return tuple(tuple(nodes) for nodes in groups)


def _share(dp: int, num_segments: int) -> int:
    if dp < 1 or num_segments < 1:
        raise UsageError(f"dp {dp} and {num_segments} segments must both be at least 1")
    if dp % num_segments:
        raise UsageError(
            f"dp {dp} is no multiple of {num_segments} segments: a pipeline would cross segments; "
            f"use {num_segments * max(1, dp // num_segments)} or {num_segments * (dp // num_segments + 1)} instead"
        )
    return dp // num_segments
