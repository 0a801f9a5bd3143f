"""Layers of each stage as users write them: counts, a Megatron-LM layout string, or what its flags say.

`11,12,12,11` | `Et*16|(t*16|)*2t*13mL` | `first=10` | `last=13` | `first=10,last=13`.
"""

from __future__ import annotations

from hetplan.cli.options import parse_counts
from hetplan.errors import UsageError
from hetplan.units import show

FLAGS = ("first", "last")


def stage_counts(
    text: str | None, option: str, num_layers: int, pp: int | None, vpp: int = 1
) -> tuple[int, ...] | None:
    """Return the decoder layers of each virtual stage; None where the option was not given.

    `pp`: None where it is not known.

    Raises:
        UsageError: the text is none of the three, or does not suit the degrees.
    """
    if text is None:
        return None
    if "=" in text:
        return _from_flags(text, option, num_layers, (pp, vpp))
    if "|" in text or text.strip().startswith("E"):
        from hetplan.plan.megatron_layout import decoder_counts, parse_layout

        stages = parse_layout(text)
        return decoder_counts(stages, pp if pp is not None else len(stages), vpp)
    return parse_counts(text, option, minimum=0)


def _from_flags(text: str, option: str, num_layers: int, degrees: tuple[int | None, int]) -> tuple[int, ...]:
    """Return layers a virtual stage; each rank shares its layers out evenly over its virtual stages."""
    from hetplan.plan.megatron_layout import flag_counts

    pp, vpp = degrees
    if pp is None:
        raise UsageError(f"{option}: {show(text)} needs the number of stages; give one --pp")
    given: dict[str, int] = {}
    for word in text.split(","):
        name, _, count = word.strip().partition("=")
        if name not in FLAGS or name in given:
            raise UsageError(f"{option}: {show(word)} is not first=N or last=N")
        (given[name],) = parse_counts(count, option, minimum=0) or (0,)
    ranks = flag_counts(num_layers, pp, first=given.get("first"), last=given.get("last"))
    uneven = [count for count in ranks if count % vpp]
    if uneven:
        raise UsageError(f"{option}: {uneven[0]} layers of a rank are no multiple of vpp {vpp}")
    return tuple(count // vpp for count in ranks) * vpp
