"""Every layout of a tiny instance, by nested loops and nothing else: what searches are compared with.

Written without a look at how any search enumerates: replicas are products of cuts, meshes and recomputations; layouts
are all multisets of replicas that take the batch; the rule book throws out what is not valid.
"""

from dataclasses import replace
from itertools import combinations, islice, permutations, product

from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.placement import cluster_places
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.workload import SHARDINGS


class TooManyError(Exception):
    """The instance has more layouts than the caller wants to price."""


def every_layout(prices, limits=None, *, most=10**9):
    """Return every layout that `check` accepts, with its estimate, on every choice of devices that differs.

    Raises:
        TooManyError: there are more than `most`.
    """
    limits = limits or Limits()
    count, found = 0, []
    for layout in unplaced_layouts(prices, limits, most=most):
        for one in every_placement(layout, prices.cluster):
            count += 1
            if count > most:
                raise TooManyError
            if not check(one, prices, limits):
                found.append((one, estimate(one, prices)))
    return found


def every_placement(layout, cluster):
    """Return the layout on all permutations of devices, but for those that only rename nodes."""
    places = cluster_places(cluster)
    needed = {}
    for r, replica in enumerate(layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            needed.setdefault(stage.group, []).extend([(r, q)] * (replica.copies * stage.mesh_size))
    seen, found = set(), []
    orders = [unlike_orders(places[group], len(meshes)) for group, meshes in needed.items()]
    for orders_of_groups in product(*orders):
        where = []
        for group, order in zip(needed, orders_of_groups, strict=True):
            where += [(f"n{places[group].node_d[i]}", f"d{places[group].domain_d[i]}") for i in order]
        names = list(dict.fromkeys(name for pair in where for name in pair))
        pattern = tuple(names.index(name) for pair in where for name in pair)
        if pattern not in seen:
            seen.add(pattern)
            found.append(placed_on(layout, needed, orders_of_groups))
    return found


def unlike_orders(places, count):
    """Return orders of `count` devices of a group, one for each sequence of nodes."""
    found = {}
    for order in permutations(range(len(places.node_d)), count):
        found.setdefault(tuple(places.node_d[i] for i in order), order)
    return list(found.values())


def placed_on(layout, needed, orders):
    devices = {}
    for (_, meshes), order in zip(needed.items(), orders, strict=True):
        for mesh, device in zip(meshes, order, strict=True):
            devices.setdefault(mesh, []).append((device, device + 1))
    rows = []
    for r, replica in enumerate(layout.replicas):
        stages = [replace(s, devices=tuple(devices[r, v % replica.pp])) for v, s in enumerate(replica.stages)]
        rows.append(replace(replica, stages=tuple(stages)))
    return replace(layout, replicas=tuple(rows))


def unplaced_layouts(prices, limits, *, most):
    """Return all layouts within the cluster and the batch, valid or not.

    Raises:
        TooManyError: there are more than `most`.
    """
    found = []
    for sharding, schedule in product([s for s in SHARDINGS if s in limits.sharding], limits.schedules):
        singles = sorted(islice(every_replica(prices, limits, schedule), most + 1), key=sort_key)
        if len(singles) > most:
            raise TooManyError
        for rows in multisets(singles, devices(prices, limits), prices.workload.global_batch, most):
            replicas = tuple(with_copies(rows))
            found.append(Layout(replicas=replicas, schedule=schedule, sharding=sharding))
            if len(found) > most:
                raise TooManyError
    return found


def devices(prices, limits):
    return {g.name: g.num_devices for g in prices.cluster.groups if g.name not in limits.exclude}


def sort_key(replica):
    stages = tuple((s.group, s.first_layer, s.end_layer, s.tp, s.cp, s.dp, s.ep) for s in replica.stages)
    modes = tuple(stage.recompute for stage in replica.stages)
    return (len(stages), stages, replica.microbatch, replica.num_microbatches, replica.vpp, modes)


def every_replica(prices, limits, schedule):
    """Yield every single pipeline (copies 1), whatever it needs."""
    layers = len(prices.model.chain)
    batch = prices.workload.global_batch
    sizes = limits.microbatch or [size for size in (1, 2, 4, 8, 16, 32) if size <= batch]
    for pp in limits.pp or range(1, layers + 1):
        for vpp in range(1, layers + 1) if schedule == "interleaved" else [1]:
            if pp * vpp > layers:
                continue
            for meshes in product(every_mesh(prices, limits), repeat=pp):
                if not fits(used_by(meshes), devices(prices, limits)):
                    continue
                for inner in combinations(range(1, layers), pp * vpp - 1):
                    for modes in product(limits.recompute, repeat=pp * vpp):
                        stages = stages_of(meshes * vpp, (0, *inner, layers), modes)
                        for size in sizes:
                            for count in range(1, batch // size + 1):
                                yield Replica(stages=stages, microbatch=size, num_microbatches=count, vpp=vpp)


def every_mesh(prices, limits):
    most = max(devices(prices, limits).values(), default=0)
    degrees = range(1, most + 1)
    for group, count in devices(prices, limits).items():
        for tp, cp, dp, ep in product(limits.tp or degrees, limits.cp, degrees, limits.ep or degrees):
            if tp * cp * dp <= count and (dp * cp) % ep == 0:
                yield group, tp, cp, dp, ep


def used_by(meshes):
    used = {}
    for group, tp, cp, dp, _ in meshes:
        used[group] = used.get(group, 0) + tp * cp * dp
    return used


def fits(used, free):
    return all(count <= free[group] for group, count in used.items())


def stages_of(meshes, cuts, modes):
    return tuple(
        Stage(group=group, first_layer=cuts[i], end_layer=cuts[i + 1], tp=tp, cp=cp, dp=dp, ep=ep, recompute=modes[i])
        for i, (group, tp, cp, dp, ep) in enumerate(meshes)
    )


def multisets(singles, free, batch, most, first=0):
    """Return every list of replicas, in order, that takes exactly the batch on devices that exist."""
    found = []
    for index in range(first, len(singles)):
        one = singles[index]
        left = batch - one.num_microbatches * one.microbatch
        used = used_by((s.group, s.tp, s.cp, s.dp, s.ep) for s in one.stages[: one.pp])
        if left < 0 or not fits(used, free):
            continue
        if left == 0:
            found.append([one])
        else:
            rest = {group: count - used.get(group, 0) for group, count in free.items()}
            found.extend([one, *others] for others in multisets(singles, rest, left, most, index))
        if len(found) > most:
            raise TooManyError
    return found


def with_copies(rows):
    """Yield equal neighbours once, with their number."""
    index = 0
    while index < len(rows):
        copies = rows.count(rows[index])
        one = rows[index]
        yield Replica(
            stages=one.stages,
            microbatch=one.microbatch,
            num_microbatches=one.num_microbatches,
            copies=copies,
            vpp=one.vpp,
        )
        index += copies
