"""Whatever a file says, reading it gives a cluster or one located sentence, soon."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cluster_samples import FULL, find_device

from hetplan.errors import SpecError
from hetplan.specs.cluster import Cluster
from hetplan.specs.read_cluster import read_cluster

NUM_MUTATIONS = 2000
NASTY = (
    "", "null", "~", "true", "on", "no", "-1", "0", "010", "0x1F", "1e30", "1" + "0" * 30, "9" * 5000, ".nan", "-.inf",
    "NaN", "1e999", "12:30:45", "2024-01-01", "[]", "{}", "[[[[", "}}}}", "- - -", "*a", "&a", "&a [*a]",
    "!!python/none",
    "!x y", "|\n  block", "<<: *x", "%YAML 1.1", "---", "...", "'", '"', "\\", "\0", "\x1b[31m", "\ud7ff", "\ufeff",
    "\U0001f600", "é", "\u2028", "\t", "\r", "'a[1-999999999]'", "'a[1-1000][1-1000]'", "a[", "a,a", "-5 GiB", "80",
    "80 Gib", "1e30 GiB", "1e-300 s", "nan GB/s", "x" * 3000, "'" + "y" * 3000 + "'", "[" * 500, "{a: " * 200,
    "cluster/v2", "../../etc/passwd", "/dev/null", "pairs.csv",
)  # fmt: skip


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:start] + data[end:]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:end] + data[start:]


def swap_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    one, two = rng.sample(range(len(lines)), 2)
    lines[one], lines[two] = lines[two], lines[one]
    return b"".join(lines)


def drop_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def indent_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[rng.randrange(len(lines))] = rng.choice([b" ", b"    ", b"\t", b"- "]) + lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _values(text: str) -> list[tuple[int, int]]:
    """Spans of the text between one `: ` and the next separator."""
    spans = []
    for index in range(len(text) - 1):
        if text[index : index + 2] == ": ":
            ends = [found for sep in (",", "}", "\n") if (found := text.find(sep, index)) >= 0]
            spans.append((index + 2, min(ends, default=len(text))))
    return spans


def replace_value(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    start, end = rng.choice(_values(text))
    return (text[:start] + rng.choice(NASTY) + text[end:]).encode()


def swap_values(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    (a, b), (c, d) = sorted(rng.sample(_values(text), 2))
    return (text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]).encode() if b <= c else data[:a]


def delete_key(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    start, end = rng.choice(_values(text))
    key_start = max(text.rfind(sep, 0, start) for sep in (",", "{", "\n")) + 1
    return (text[:key_start] + text[end:].removeprefix(",")).encode()


def rename_key(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    colon = rng.choice(_values(text))[0] - 2
    return (text[: colon - 1] + rng.choice(["", "x", "é", "_", '"', " "]) + text[colon:]).encode()


def insert_nasty(data: bytes, rng: random.Random) -> bytes:
    where = rng.randrange(len(data))
    return data[:where] + rng.choice(NASTY).encode() + data[where:]


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bytes, cut, repeat, swap_lines, drop_line, indent_line, replace_value, replace_value, swap_values, delete_key,
    rename_key, insert_nasty,
)  # fmt: skip


def outcome(path: Path) -> str:
    """`read`, or `refused` after checking the message."""
    try:
        cluster = read_cluster(path, find_device)
    except SpecError as error:
        message = str(error)
        assert message.isprintable(), message
        assert len(message) < 600, message
        assert error.location is not None, message
        assert error.location.line >= 1
        assert error.location.column >= 1
        assert message.startswith(f"{error.location}: "), message
        assert message.count(str(path)) == 1, message
        return "refused"
    assert isinstance(cluster, Cluster)
    assert 1 <= cluster.num_devices <= 10_000_000
    return "read"


def test_every_mutation_of_a_cluster_file_is_read_or_refused_in_one_sentence(tmp_path):
    rng = random.Random(20240817)
    path = tmp_path / "lab.yaml"
    outcomes: Counter[str] = Counter()
    for number in range(NUM_MUTATIONS):
        data = FULL.encode()
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            try:
                data = MUTATIONS[(number + rng.randrange(2)) % len(MUTATIONS)](data, rng)
            except (UnicodeDecodeError, IndexError, ValueError):
                break  # an earlier mutation left nothing this one can work on
        path.write_bytes(data)
        outcomes[outcome(path)] += 1
    assert outcomes["refused"] > NUM_MUTATIONS / 3
    assert outcomes["read"] > 20, "mutations that leave a valid file must still be read"
