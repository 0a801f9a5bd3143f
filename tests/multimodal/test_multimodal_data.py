"""Data files, tables of lengths, and lengths of conversations with images."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modular_jobs import data_of

from hetplan.errors import SpecError
from hetplan.specs.conversations import Counting, conversation_rows, image_tokens
from hetplan.specs.data import Histogram, Items, Lognormal, Packing, Row
from hetplan.specs.image_size import image_size
from hetplan.specs.read_data import read_data
from hetplan.specs.read_lengths import lengths_text, read_lengths


def test_a_mixture_is_read() -> None:
    data = data_of("""
name: mix
sources:
  - name: captions
    weight: 0.7
    text: {lognormal: {median: 400, sigma: 0.8, most: 8192}}
    image: {count: {histogram: {values: [0, 1, 4], weights: [1, 2, 1]}}, tokens: {constant: 576}}
  - text: {constant: 4096}
packing: {tokens: 8192}
""")
    assert data.sources[0].text == Lognormal(median=400, sigma=0.8, least=1, most=8192)
    image = data.sources[0].items["image"]
    assert isinstance(image, Items)
    assert image.count == Histogram(values=(0, 1, 4), weights=(1.0, 2.0, 1.0))
    assert data.packing == Packing(tokens=8192, attention="document")
    assert data.modalities == ("image",)
    assert data.sources[1].name == "source-2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x", "either 'sources:' or 'lengths:'"),
        ("sources: []", "at least one source"),
        ("sources: [{text: {constant: 1, lognormal: {median: 1, sigma: 1}}}]", "exactly one of constant"),
        ("sources: [{text: {constant: 0}}]", "sources\\[0\\].text.constant"),
        ("sources: [{text: {histogram: {values: [1, 2], weights: [1]}}}]", "2 values need as many weights"),
        ("sources: [{text: {histogram: {values: [1, 2], weights: [0, 0]}}}]", "at least one weight"),
        ("sources: [{text: {constant: 1}, image: {token: {constant: 4}}}]", "key 'tokens' is missing"),
        ("sources: [{text: {constant: 1}}]\npacking: {tokens: 8, attention: none}", "packing.attention"),
        ("sources: [{text: {constant: 1}}]\nextra: 1", "unknown key 'extra'"),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        data_of(text)


SIZES = st.lists(st.integers(1, 5000), max_size=4).map(tuple)


@given(rows=st.lists(st.tuples(st.integers(0, 10_000), SIZES, SIZES), min_size=1, max_size=8))
def test_lengths_are_read_back(
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = tuple(
        Row(text=text, items={name: sizes for name, sizes in (("image", image), ("audio", audio)) if sizes})
        for text, image, audio in rows
    )
    path = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    path.write_text(lengths_text(table))
    assert read_lengths(path) == table


def test_json_lines_and_files_that_name_tables(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 5, "image": [576, 576]}\n\n{"text": 7, "image": []}\n')
    rows = (Row(text=5, items={"image": (576, 576)}), Row(text=7))
    assert read_lengths(tmp_path / "a.jsonl") == rows
    (tmp_path / "d.yaml").write_text("hetplan: data/v1\nlengths: a.jsonl\nreads: {vision: image}\n")
    assert read_data(tmp_path / "d.yaml").rows == rows
    assert read_data(tmp_path / "a.jsonl").rows == rows


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "txt,image\n1,2\n", "a.csv:1:1: the header"),
        ("a.csv", "text,image\n1\n", "a.csv:2:1: 1 cells under 2 names"),
        ("a.csv", "text,image\n1,5 x\n", "a.csv:2:1: 'x' is no number of tokens"),
        ("a.csv", "text\n", "no sample"),
        ("a.jsonl", "{\n", "a.jsonl:1:1: this line is no JSON"),
        ("a.jsonl", '{"text": -1}\n', "'-1' is no number of tokens"),
        ("a.jsonl", "[1]\n", "a line is like"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=words):
        read_lengths(tmp_path / name)


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", width, height) + bytes(5)


def jpeg(width: int, height: int) -> bytes:
    metadata = b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    frame = b"\xff\xc2" + struct.pack(">HBHH", 17, 8, height, width) + bytes(10)
    return b"\xff\xd8" + metadata + frame


def test_sizes_come_from_the_head_of_image_files(tmp_path: Path) -> None:
    gif = b"GIF89a" + struct.pack("<HH", 3, 4) + bytes(4)
    webp = b"RIFF" + bytes(4) + b"WEBPVP8X" + bytes(8) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")
    cases = {"a.png": (png(640, 480), (640, 480)), "a.jpg": (jpeg(1024, 768), (1024, 768)), "a.gif": (gif, (3, 4))}
    cases |= {"a.webp": (webp, (640, 480))}
    for name, (content, size) in cases.items():
        (tmp_path / name).write_bytes(content)
        assert image_size(tmp_path / name) == size
    (tmp_path / "text").write_text("no image")
    assert image_size(tmp_path / "text") is None
    assert image_size(tmp_path / "missing") is None


def test_conversations_become_rows(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(png(448, 224))
    samples = [
        {
            "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "abc"}],
            "image": "photo.png",
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "width": 280, "height": 280}, {"type": "text", "text": "x" * 40}],
                }
            ]
        },
        {"messages": [{"role": "user", "content": "hello"}], "num_tokens": 17},
        {"messages": [], "images": [{"width": 56, "height": 56}, {"width": 56, "height": 56}]},
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps(sample) for sample in samples))
    rows = conversation_rows(tmp_path / "set.jsonl", Counting())
    assert rows == (
        Row(text=2, items={"image": (16 * 8,)}),
        Row(text=10, items={"image": (100,)}),
        Row(text=17),
        Row(text=1, items={"image": (4, 4)}),
    )
    (tmp_path / "set.json").write_text(json.dumps(samples))
    assert conversation_rows(tmp_path / "set.json", Counting()) == rows
    fixed = conversation_rows(tmp_path / "set.jsonl", Counting(image_tokens=576))
    assert fixed[3].items == {"image": (576, 576)}


def test_large_and_small_images_are_scaled_into_bounds() -> None:
    counting = Counting(most_pixels=28 * 28 * 1000, least_pixels=28 * 28 * 16)
    assert image_tokens(4000, 3000, counting) <= 1000
    assert image_tokens(4000, 3000, counting) > 900
    assert image_tokens(10, 10, counting) >= 16
    assert image_tokens(280, 560, counting) == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"image": "a.png"}', "a sample has 'messages' or 'conversations'"),
        ("{", "this is no JSON"),
        ('{"messages": [], "image": "missing.png"}', "the size of image 'missing.png' is not known"),
    ],
)
def test_a_wrong_data_set_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "set.jsonl").write_text(text)
    with pytest.raises(SpecError, match=words):
        conversation_rows(tmp_path / "set.jsonl", Counting())
