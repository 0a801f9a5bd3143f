"""The table that `nvidia-smi` prints without options: two lines a device, its name cut where it is long."""

from __future__ import annotations

import re

from hetplan.specs.importers.facts import Facts, NodeSheet, SourceText
from hetplan.specs.importers.nvidia_smi import Card, counted, quantity, refuse_mig

_DEVICE = re.compile(
    r"\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)?\s*\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d"
)
_POWER = re.compile(r"/\s*(\d+)W\b")
_MEMORY = re.compile(r"\|\s*\d+MiB\s*/\s*(\d+)MiB\s*\|")
_MIG = re.compile(r"\|[^|]*\|[^|]*\|\s*(Enabled|Disabled)\*?\s*\|")
_CUT = re.compile(r"\s*\.\.\.?$")


def read_table(source: SourceText) -> Facts:
    """Return the devices of a table.

    Raises:
        SpecError: a device is missing, or its second line is.
    """
    cards: list[Card] = []
    waiting: tuple[int, str] | None = None
    for line, text in enumerate(source.lines, 1):
        if (device := _DEVICE.match(text)) is not None:
            if waiting is not None:
                raise source.error(f"GPU {len(cards)} has no line of numbers below its name", waiting[0])
            if int(device[1]) != len(cards):
                raise source.error(f"GPU {device[1]} where GPU {len(cards)} was expected", line)
            waiting = (line, _CUT.sub("", device[2]))
        elif waiting is not None and (total := _MEMORY.search(text)) is not None:
            limit = _POWER.search(text)
            power = quantity(source, line, f"{limit[1]} W", "W") if limit else None
            memory = quantity(source, line, f"{total[1]} MiB", "bytes")
            cards.append(Card(product=waiting[1], memory_bytes=memory, power_limit_w=power))
            waiting = None
        elif cards and (mig := _MIG.match(text)) is not None:
            refuse_mig(source, line, mig[1])
    if waiting is not None:
        raise source.error(f"GPU {len(cards)} has no line of numbers below its name: the text is cut", waiting[0])
    return Facts(sheets=(NodeSheet(source=source.name, cards=counted(source, cards)),))
