"""Watts and dollars of devices in use.

A device draws its idle share all the time and the rest in proportion to how busy it is:
`limit x (idle + (1 - idle) x utilisation)`; the limit is the power limit, or the TDP where none is set.
"""

from __future__ import annotations

from hetplan.costs.constants import constants_of
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Group

SECONDS_PER_HOUR = 3600.0


def power_w(group: Group, utilization: float, calibration: Calibration) -> float:
    """Return the draw of one device that computes a fraction `utilization` of the time."""
    limit_w = group.device.tdp_w if group.power_w is None else group.power_w
    idle = constants_of(group, calibration).idle_power_fraction
    return limit_w * (idle + (1.0 - idle) * min(1.0, max(0.0, utilization)))


def usd_per_s(group: Group) -> float | None:
    """Return the price of one device for one second: the group's, else the catalog's, else None."""
    hourly = group.device.usd_per_hour if group.usd_per_device_hour is None else group.usd_per_device_hour
    return None if hourly is None else hourly / SECONDS_PER_HOUR
