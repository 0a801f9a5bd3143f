"""What ranks of neighbouring stages send each other, whatever their meshes are.

Both stages cut a microbatch's rows by samples (dp), positions (cp) and, with sequence parallelism, by tp. A message is
the rows two ranks have in common. Where tp ranks hold the same rows, receiver `i` takes them from holder ``i % n``: no
stage gathers before it sends and nothing is sent twice to one rank. Gradients go back by the same rule with the roles
exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.runtime.ranks import Rows, Seat, Task, coordinates, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Rows of one microbatch that `sender` has and `receiver` wants; ranges are local to each."""

    sender: int
    receiver: int
    sent: Rows
    kept: Rows

    @property
    def num_rows(self) -> int:
        """Rows of the message."""
        return sum(end - first for first, end in self.sent)


def messages(task: Task, senders: Sequence[Seat], receivers: Sequence[Seat]) -> tuple[Message, ...]:
    """Return all messages between two stages' meshes for one microbatch."""
    classes: dict[Rows, list[Seat]] = {}
    for seat in senders:
        classes.setdefault(rows_of(task, seat), []).append(seat)
    found = []
    for receiver in receivers:
        wanted = rows_of(task, receiver)
        tp_rank = coordinates(receiver, task.stage(receiver))[2]
        for held, holders in classes.items():
            sent, kept = _common(held, wanted)
            if sent:
                sender = holders[tp_rank % len(holders)]
                found.append(Message(sender=sender.rank, receiver=receiver.rank, sent=sent, kept=kept))
    return tuple(found)


def _common(held: Rows, wanted: Rows) -> tuple[Rows, Rows]:
    """Return the rows both have, as local ranges of each, in the holder's order."""
    sent, kept = [], []
    held_base = 0
    for a, b in held:
        wanted_base = 0
        for c, d in wanted:
            low, high = max(a, c), min(b, d)
            if low < high:
                sent.append((held_base + low - a, held_base + high - a))
                kept.append((wanted_base + low - c, wanted_base + high - c))
            wanted_base += d - c
        held_base += b - a
    return tuple(sent), tuple(kept)
