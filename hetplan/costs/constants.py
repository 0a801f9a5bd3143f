"""Constants of one group: its calibration where there is one, else assumptions that know about power.

Chips with more peak per watt hold less of it: under a dense GEMM the clock falls until the power limit is met.
Published ceilings of large GEMMs, over dense peak: A100 (0.78 TFLOP/s a watt) 0.87, H100 (1.4) 0.80, B200 (2.3) 0.78,
MI300X (1.7) 0.51; whole training runs fall faster, H100 at about three quarters of an A100's fraction. Assumed rule:

    fraction = default fraction x min(1, (0.78 TFLOP/s/W) / (peak / power limit)) ** 0.4

for uncalibrated devices, with the 16-bit peak. A power limit below the TDP slows a device by the same rule.
"""

from __future__ import annotations

from dataclasses import replace

from hetplan.specs.calibration import Calibration, DeviceConstants
from hetplan.specs.cluster import Group

REFERENCE_FLOP_PER_J = 0.78e12
"""Peak per watt up to which the default fractions hold: an A100 of 400 W."""
POWER_EXPONENT = 0.4
"""Assumed; see the module's text."""


def constants_of(group: Group, calibration: Calibration) -> DeviceConstants:
    """Return the constants of a group's devices."""
    stated = calibration.devices.get(group.device.name)
    if stated is not None:
        return stated
    assumed = DeviceConstants()
    peaks = group.device.peak_flop_per_s
    peak = peaks.get("bf16") or peaks.get("fp16") or 0.0
    limit_w = group.device.tdp_w if group.power_w is None else group.power_w
    if limit_w <= 0 or peak / limit_w <= REFERENCE_FLOP_PER_J:
        return assumed
    factor = (REFERENCE_FLOP_PER_J * limit_w / peak) ** POWER_EXPONENT
    return replace(
        assumed,
        gemm_peak_fraction=assumed.gemm_peak_fraction * factor,
        attention_fraction=assumed.attention_fraction * factor,
    )
