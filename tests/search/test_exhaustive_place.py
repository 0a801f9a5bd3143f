"""Choices of devices: every one that differs, none that only renames nodes."""

from dataclasses import replace

import brute
import pytest
import tiny

from hetplan.plan.placement import cluster_places, mesh_devices, place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.exhaustive_place import MOST_PLACEMENTS, placements
from hetplan.specs.cluster import Cluster, Group


def nodes_of(name, nodes, per_node, **changes):
    plain = Group(
        name=name,
        device=tiny.device(name.upper(), 1e14),
        nodes=tuple(nodes),
        devices_per_node=per_node,
        site="main",
        usable_memory_bytes=80 * tiny.GIB,
    )
    return replace(plain, **changes)


def pipeline(*stages, copies=1, **degrees):
    cuts = range(len(stages) + 1)
    return Replica(
        stages=tuple(
            Stage(group=group, first_layer=first, end_layer=end, **degrees)
            for group, first, end in zip(stages, cuts, cuts[1:], strict=False)
        ),
        microbatch=1,
        num_microbatches=1,
        copies=copies,
    )


CLUSTERS = {
    "one node": (nodes_of("a", ["x"], 4),),
    "two pairs": (nodes_of("a", ["x", "y"], 2),),
    "a slot left out": (nodes_of("a", ["x", "y", "z"], 2, left_out=frozenset({(1, 0)})),),
    "domains of two nodes": (nodes_of("a", ["x", "y", "z", "w"], 1, domain_nodes=2),),
    "two groups on two hosts": (nodes_of("a", ["x", "y"], 1), nodes_of("b", ["x", "y"], 1)),
    "two groups, one host of two shared": (nodes_of("a", ["x", "y"], 2), nodes_of("b", ["x"], 1)),
}
LAYOUTS = {
    "pipeline": (pipeline("a", "a"),),
    "copies": (pipeline("a", copies=2),),
    "pipeline and single": (pipeline("a", "a"), pipeline("a")),
    "tp pairs": (pipeline("a", tp=2),),
    "both groups": (pipeline("a", "b"),),
    "both groups twice": (pipeline("a", "b"), pipeline("b", "a")),
}


def patterns(placed, cluster):
    places = cluster_places(cluster)
    found = []
    for layout in placed:
        names, pattern = {}, []
        for replica in layout.replicas:
            for stage in replica.stages:
                for device in mesh_devices(stage, replica.copies).ravel():
                    for kind, numbers in (("n", places[stage.group].node_d), ("d", places[stage.group].domain_d)):
                        pattern.append(names.setdefault((kind, numbers[device]), len(names)))
        found.append(tuple(pattern))
    return found


@pytest.mark.parametrize("groups", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_placements_are_those_of_all_permutations_but_for_names(groups, rows):
    cluster, layout = Cluster(name="c", groups=groups, networks=()), Layout(replicas=rows)
    free = {group.name: group.num_devices for group in groups}
    needed = {}
    for replica in rows:
        for stage in replica.stages:
            needed[stage.group] = needed.get(stage.group, 0) + replica.copies * stage.mesh_size
    if any(count > free.get(group, 0) for group, count in needed.items()):
        pytest.skip("the layout needs more devices than there are")
    found = patterns(placements(layout, cluster), cluster)
    assert len(set(found)) == len(found)
    assert set(found) == set(patterns(brute.every_placement(layout, cluster), cluster))


def test_a_layout_with_very_many_choices_is_placed_in_the_usual_orders():
    cluster = Cluster(name="c", groups=(nodes_of("a", "stuvwxyz", 4),), networks=())
    layout = Layout(replicas=(pipeline(*["a"] * 8, copies=4),))
    found = placements(layout, cluster)
    assert found == [place(layout, cluster, "stages"), place(layout, cluster, "pipelines")]
    assert len(found) < MOST_PLACEMENTS
