"""Which ranks are measured together.

Links (`link_sets`): on one host of each kind two ranks and all of them; for each pair of kinds (a kind with itself
where it has two hosts) one rank of each; one rank of every host. Where two disjoint pairs of ranks cross between the
same hosts or kinds, both run at once: the time tells whether they share a NIC or a line. Layers (`tp_sets`): groups of
neighbouring ranks of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetplan.profiling.records import LinkKind

Ranked = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSet:
    """Sets of ranks that do the same at the same time; mostly one."""

    kind: LinkKind
    sets: tuple[Ranked, ...]


def link_sets(hosts: Sequence[str], kinds: Sequence[str]) -> tuple[LinkSet, ...]:
    """Return what to measure for ranks on these hosts and of these kinds of device (or group)."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    kind_of = {host: kinds[ranks[0]] for host, ranks in ranks_of.items()}
    found: list[LinkSet] = []
    for host in _one_of_each(kind_of, [host for host, ranks in ranks_of.items() if len(ranks) > 1]):
        found.extend(_inside(ranks_of[host]))
    for first, second in _host_pairs(kind_of):
        pair = (ranks_of[first][0], ranks_of[second][0])
        found.extend((LinkSet(kind="send", sets=(pair,)), LinkSet(kind="all_reduce", sets=(pair,))))
        if len(ranks_of[first]) > 1 and len(ranks_of[second]) > 1:
            found.append(LinkSet(kind="send", sets=(pair, (ranks_of[first][1], ranks_of[second][1]))))
    if len(ranks_of) > 2:
        found.append(LinkSet(kind="all_reduce", sets=(tuple(ranks[0] for ranks in ranks_of.values()),)))
    found.extend(_side_by_side(ranks_of, kind_of))
    return tuple(dict.fromkeys(found))


def _inside(ranks: list[int]) -> Iterator[LinkSet]:
    pair = (ranks[0], ranks[1])
    yield LinkSet(kind="send", sets=(pair,))
    for count in sorted({2, len(ranks)}):
        yield LinkSet(kind="all_reduce", sets=(tuple(ranks[:count]),))
    if len(ranks) > 3:
        yield LinkSet(kind="send", sets=(pair, (ranks[2], ranks[3])))


def _one_of_each(kind_of: dict[str, str], hosts: Sequence[str]) -> list[str]:
    first: dict[str, str] = {}
    for host in hosts:
        first.setdefault(kind_of[host], host)
    return list(first.values())


def _host_pairs(kind_of: dict[str, str]) -> list[tuple[str, str]]:
    """Return one pair of hosts for each pair of kinds."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for first, second in combinations(kind_of, 2):
        a, b = sorted((kind_of[first], kind_of[second]))
        found.setdefault((a, b), (first, second))
    return list(found.values())


def _side_by_side(ranks_of: dict[str, list[int]], kind_of: dict[str, str]) -> Iterator[LinkSet]:
    """Yield two transfers between the same two kinds that have no host in common."""
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for first, second in combinations(kind_of, 2):
        if kind_of[first] != kind_of[second]:
            pairs.setdefault((kind_of[first], kind_of[second]), []).append((first, second))
    for found in pairs.values():
        for other in found[1:]:
            if not set(other) & set(found[0]):
                both = [(ranks_of[a][0], ranks_of[b][0]) for a, b in (found[0], other)]
                yield LinkSet(kind="send", sets=tuple(both))
                break


def tp_sets(kinds: Sequence[str], hosts: Sequence[str], tp: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of `tp` ranks of one kind, within hosts first; ranks left over are in none."""
    found: list[tuple[int, ...]] = []
    left: dict[str, list[int]] = {}
    places: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(zip(kinds, hosts, strict=True)):
        places.setdefault(place, []).append(rank)
    for (kind, _), ranks in places.items():
        whole = len(ranks) // tp * tp
        found.extend(tuple(ranks[i : i + tp]) for i in range(0, whole, tp))
        left.setdefault(kind, []).extend(ranks[whole:])
    for ranks in left.values():
        found.extend(tuple(ranks[i : i + tp]) for i in range(0, len(ranks) // tp * tp, tp))
    return tuple(sorted(found))
