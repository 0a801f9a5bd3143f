"""A testbed file says what its cluster file says, and pacing makes an action as long as it must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bed_modules import SCRIPTS, bed_spec, paced, relay

from hetplan.catalog.devices import find_device
from hetplan.costs.links import link_between
from hetplan.errors import HetplanError
from hetplan.specs.calibration import Calibration, NetworkConstants
from hetplan.specs.read_cluster import cluster_from_text

BEDS = sorted((SCRIPTS / "beds").glob("*.yaml"))
TWO_SITES = """
hetplan: testbed/v1
name: two
groups:
  west: {hosts: 2, speed: 0.5, rate: 10 Gbit/s, site: west}
  east: {hosts: 1, speed: 0.25, rate: 1 Gbit/s, site: east}
line: {rate: 200 Mbit/s, delay: 20 ms}
"""


def bed_of(text: str, folder: Path) -> Any:
    path = folder / "bed.yaml"
    path.write_text(text, encoding="utf-8")
    return bed_spec.read_bed(path)


@pytest.mark.parametrize("path", BEDS, ids=lambda path: path.stem)
def test_every_bed_that_ships_is_a_valid_cluster_and_leaves_the_machine_some_room(path: Path) -> None:
    bed = bed_spec.read_bed(path)
    cluster = cluster_from_text(bed_spec.cluster_of(bed), path.name, find_device)
    assert [node for group in cluster.groups for node in group.nodes] == [host for host, _ in bed.hosts()]
    assert cluster.num_devices == len(list(bed.ranks()))
    assert sum(group.speed for _, _, group in bed.ranks()) <= 1.0 + 1e-9, "one of two cores"


def test_hosts_talk_at_the_rate_of_the_slower_port_and_sites_over_the_line(tmp_path: Path) -> None:
    bed = bed_of(TWO_SITES, tmp_path)
    cluster = cluster_from_text(bed_spec.cluster_of(bed), "two.yaml", find_device)
    whole = Calibration(networks={"*": NetworkConstants(bandwidth_fraction=1.0)})
    inside = link_between(cluster, "west", "west", whole)
    across = link_between(cluster, "west", "east", whole)
    assert inside is not None
    assert across is not None
    assert inside.bandwidth_bytes_per_s == pytest.approx(10e9 / 8)
    assert (across.bandwidth_bytes_per_s, across.latency_s, across.shared) == (pytest.approx(25e6), 0.02, True)


def test_devices_differ_by_their_speed(tmp_path: Path) -> None:
    cluster = cluster_from_text(bed_spec.cluster_of(bed_of(TWO_SITES, tmp_path)), "two.yaml", find_device)
    west, east = (cluster.group(name).device.peak_flop_per_s["fp32"] for name in ("west", "east"))
    assert west == 2 * east


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("line: {rate: 200 Mbit/s, delay: 20 ms}\n", ""),
        ("site: east", "site: west"),
        ("speed: 0.5", "speed: 1.5"),
        ("hosts: 2", "host: 2"),
    ],
)
def test_a_senseless_bed_is_refused(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(HetplanError):
        bed_of(TWO_SITES.replace(old, new), tmp_path)


class _Time:
    """A clock that only work and sleep move."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def monotonic(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds

    def compute(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds


class _Clock:
    def __init__(self) -> None:
        self.seconds = {"tp": 0.0}


def test_a_paced_action_takes_its_processor_time_over_the_speed_and_its_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, clock = _Time(), _Clock()
    monkeypatch.setattr(paced, "time", now)
    pace = paced.Pace(0.25)
    sent_at = []
    send = pace.settled(lambda: sent_at.append(now.wall_s))

    def action() -> str:
        now.compute(1.0)
        now.wall_s += 0.5
        clock.seconds["tp"] += 0.5
        send()
        return "done"

    assert pace.paced(action, lambda: clock)() == "done"
    assert now.wall_s == pytest.approx(1.0 / 0.25 + 0.5)
    assert sent_at == [pytest.approx(4.5)], "nothing leaves before its time"


def test_an_action_the_machine_held_up_is_not_slowed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = _Time()
    monkeypatch.setattr(paced, "time", now)

    def held_up() -> None:
        now.compute(1.0)
        now.wall_s += 2.0

    paced.Pace(0.25).paced(held_up, lambda: None)()
    assert now.wall_s == pytest.approx(4.0)


def test_a_line_carries_frames_at_its_rate_after_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[bytes] = []
    waiting = [b"x" * 1000, b"y" * 1000]

    def read(_: int, __: int) -> bytes:
        if not waiting:
            raise BlockingIOError
        return waiting.pop(0)

    monkeypatch.setattr(relay.os, "read", read)
    monkeypatch.setattr(relay.os, "write", lambda _, frame: arrived.append(frame))
    direction = relay.Direction(0, 1, 1e5, 0.02)
    direction.take(0.0)
    assert direction.due_s() == pytest.approx(0.03)
    direction.deliver(0.029)
    assert not arrived
    direction.deliver(0.0301)
    assert [frame[:1] for frame in arrived] == [b"x"]
    direction.deliver(0.0401)
    assert len(arrived) == 2


def test_a_full_queue_drops_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1000] * 60

    def read(_: int, __: int) -> bytes:
        if not left:
            raise BlockingIOError
        return b"z" * left.pop()

    monkeypatch.setattr(relay.os, "read", read)
    arrived: list[bytes] = []
    monkeypatch.setattr(relay.os, "write", lambda _, frame: arrived.append(frame))
    direction = relay.Direction(0, 1, 1e5, 0.0)
    direction.take(0.0)
    direction.deliver(10.0)
    assert 20 < len(arrived) < 60
