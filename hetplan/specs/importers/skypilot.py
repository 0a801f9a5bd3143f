"""A SkyPilot task: `resources:` with accelerators and place, `num_nodes:`.

SkyPilot's names say the family and sometimes the memory (`A100-80GB`, `H100`), not the board.
"""

from __future__ import annotations

import re

from hetplan.specs.decode import document_from_text
from hetplan.specs.fields import Fields
from hetplan.specs.importers.facts import Cards, Facts, NodeSheet, SourceText
from hetplan.units import show

MOST_NODES = 100_000
_ACCELERATORS = re.compile(r"([\w.-]+?)(?::(\d{1,3}))?")


def read_task(source: SourceText) -> Facts:
    """Return the nodes a task asks for.

    Raises:
        SpecError: it asks for alternatives, for no accelerator, or for parts of one.
    """
    root = document_from_text(source.text, source.name, "")
    resources = root.fields("resources")
    for key in ("any_of", "ordered"):
        if resources.has(key):
            raise resources.error("lists alternatives; write the one that was given to the task", key)
    product, count = _accelerators(resources)
    num_nodes = root.integer("num_nodes", default=1, minimum=1, maximum=MOST_NODES)
    place = [resources.text(key, default=None) for key in ("zone", "region", "cloud")]
    if resources.has("infra"):
        place.insert(0, resources.text("infra").replace("/", "-"))
    sheet = NodeSheet(
        source=source.name,
        group=root.text("name", default="sky"),
        num_nodes=num_nodes,
        cards=(Cards(count=count, product=product),),
        site=next((text for text in place if text and "*" not in text), None),
    )
    return Facts(sheets=(sheet,), name=root.text("name", default=None))


def _accelerators(resources: Fields) -> tuple[str, int]:
    if resources.is_mapping("accelerators"):
        table = resources.fields("accelerators")
        names = table.names()
        if len(names) != 1:
            raise resources.error("lists alternatives; write the one that was given to the task", "accelerators")
        return names[0], table.integer(names[0], minimum=1, maximum=1024)
    text = resources.text("accelerators")
    match = _ACCELERATORS.fullmatch(text)
    if match is None or match[2] == "0":
        raise resources.error(f"expected accelerators such as 'A100-80GB:8', found {show(text)}", "accelerators")
    return match[1], int(match[2] or 1)
