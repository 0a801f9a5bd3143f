from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from hetplan.errors import SpecError
from hetplan.specs.decode import Fields, document_from_text, read_document
from hetplan.specs.nodes import MAX_NODES

HEADER = "hetplan: cluster/v1\n"
MOST_BYTES = 2**26


def fields(body: str) -> Fields:
    return document_from_text(HEADER + body, "x.yaml", "cluster")


def refused(read) -> str:
    """The message of the one error, which must be short and on one line, and come before much is built."""
    tracemalloc.start()
    try:
        with pytest.raises(SpecError) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    assert caught.value.location is not None
    return message


def test_typed_values_of_a_mapping():
    root = fields(
        "name: lab\ncount: 8\nratio: 1.5e-3\non: true\nmemory: 80 GiB\nnames: [a, 'b']\nlayers: [1, -2]\n"
        "host: {cores: 64}\ngroups: {a: {n: 1}, b: {n: 2}}\nrows:\n- {n: 1}\n- {n: 2}\n"
    )
    assert root.text("name") == "lab"
    assert root.integer("count") == 8
    assert root.number("ratio") == 1.5e-3
    assert root.flag("on") is True
    assert root.quantity("memory", "bytes") == 80 * 2**30
    assert root.texts("names") == ("a", "b")
    assert root.integers("layers") == (1, -2)
    assert root.fields("host").integer("cores") == 64
    assert {name: entry.integer("n") for name, entry in root.table("groups").items()} == {"a": 1, "b": 2}
    assert [row.integer("n") for row in root.rows("rows")] == [1, 2]
    root.finish()


def test_defaults_of_absent_keys():
    root = fields("a: 1\n")
    assert root.text("t", default=None) is None
    assert root.text("t", default="x") == "x"
    assert root.choice("c", ("p", "q"), default="p") == "p"
    assert root.integer("i", default=3) == 3
    assert root.number("n", default=0.5) == 0.5
    assert root.flag("f", default=False) is False
    assert root.quantity("q", "bytes", default=None) is None
    assert root.texts("ts", default=()) == ()
    assert root.integers("is", default=None) is None
    assert root.fields("m", required=False).integer("inside", default=7) == 7
    assert root.table("tab", required=False) == {}
    assert root.rows("rs", required=False) == ()
    assert not root.has("t")


def test_words_and_clock_times_stay_text():
    root = fields("a: on\nb: no\nc: 12:30\nd: 010\ne: 0x10\nf: 1_000\ng: 2024-01-01\n")
    for key, text in zip("abcdefg", ["on", "no", "12:30", "010", "0x10", "1_000", "2024-01-01"], strict=True):
        assert root.text(key) == text
    for key in "abcdefg":
        assert "expected true or false" in refused(lambda key=key: root.flag(key))
    for key in "cdefg":
        assert "expected a whole number" in refused(lambda key=key: root.integer(key))


def test_raw_reads_scalars_as_json_does():
    root = fields('a: {b: [1, 2.5, true, null, "7", on, ~, -3e2]}\n')
    assert root.raw("a") == {"b": [1, 2.5, True, None, "7", "on", None, -300.0]}
    assert root.raw_mapping() == {"hetplan": "cluster/v1", "a": root.raw("a")}


def test_an_error_names_file_line_column_and_path():
    root = fields("groups:\n  a100:\n    count:   x\n")
    message = refused(lambda: root.table("groups")["a100"].integer("count"))
    assert message == "x.yaml:4:14: groups.a100.count: expected a whole number, found 'x'"


def test_an_item_of_a_list_is_located():
    root = fields("layers: [1,\n  2, x]\n")
    assert refused(lambda: root.integers("layers")).startswith("x.yaml:3:6: layers[2]: ")
    assert root.location("layers", 1).line == 3


@pytest.mark.parametrize(
    ("body", "read", "problem"),
    [
        ("a: .nan", lambda f: f.number("a"), "not finite"),
        ("a: .inf", lambda f: f.number("a"), "not finite"),
        ("a: NaN", lambda f: f.raw("a"), "not finite"),
        ("a: [1, -.inf]", lambda f: f.raw("a"), "a[1]: "),
        ("a: 1e999", lambda f: f.number("a"), "too large"),
        ("a: 1e30", lambda f: f.integer("a"), "expected a whole number"),
        ("a: 1" + "0" * 30, lambda f: f.integer("a"), "at most"),
        ("a: 1" + "0" * 30, lambda f: f.raw("a"), "at most"),
        ("a: " + "9" * 1_000_000, lambda f: f.integer("a"), "beyond any sensible count"),
        ("a: " + "9" * 1_000_000, lambda f: f.number("a"), "expected a number"),
        ("a: " + "9" * 1_000_000, lambda f: f.raw("a"), "beyond any sensible count"),
        ("a: 0", lambda f: f.integer("a", minimum=1), "at least 1"),
        ("a: 9", lambda f: f.integer("a", maximum=8), "at most 8"),
        ("a: 0.1", lambda f: f.number("a", minimum=0.5), "at least 0.5"),
        ("a: 2", lambda f: f.number("a", maximum=1), "at most 1"),
        ("a: '8'", lambda f: f.integer("a"), "the quoted text '8'"),
        ("a: 8", lambda f: f.quantity("a", "bytes"), "without a unit"),
        ("a: 0 B", lambda f: f.quantity("a", "bytes", positive=True), "above zero"),
        ("a:", lambda f: f.text("a"), "found nothing"),
        ("a: null", lambda f: f.integer("a", default=1), "found nothing"),
        ("a: ''", lambda f: f.text("a"), "an empty one"),
        ("a: [x, '']", lambda f: f.texts("a"), "a[1]: expected a text, found an empty one"),
        ("a: x", lambda f: f.texts("a"), "expected a list, found 'x'"),
        ("a: [x]", lambda f: f.fields("a"), "expected a mapping, found a list"),
        ("a: [x]", lambda f: f.rows("a"), "a[0]: expected a mapping"),
        ("a: {b: 1}", lambda f: f.table("a"), "a.b: expected a mapping"),
        ("a: {b: 1}", lambda f: f.text("a"), "found a mapping"),
        ("a: fulll", lambda f: f.text("a", choices=["none", "full"]), "not one of none, full; did you mean 'full'?"),
        ("a: fulll", lambda f: f.choice("a", ("none", "full")), "not one of none, full; did you mean 'full'?"),
        ("b: 1", lambda f: f.text("a"), "key 'a' is missing"),
        ("nodez: 1", lambda f: f.text("nodes"), "key 'nodes' is missing; is it 'nodez'?"),
        ("a: " + "x" * 10_000, lambda f: f.integer("a"), "xxx...'"),
        ('a: "\\n\\x1b\\u202e"', lambda f: f.integer("a"), "'\\n\\x1b\\u202e'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(body, read, problem):
    assert problem in refused(lambda: read(fields(body)))


def test_unknown_keys_are_refused_with_the_nearest_known_one():
    root = fields("groups: {a: {devices_per_nod: 8}}\n")
    group = root.table("groups")["a"]
    group.integer("devices_per_node", default=1)
    message = refused(group.finish)
    assert message == "x.yaml:2:14: groups.a: unknown key 'devices_per_nod'; did you mean 'devices_per_node'?"


def test_a_strange_key_cannot_break_the_message():
    root = fields('"a\\nb": {"\\x1b[31m": 1}\n')
    inner = root.fields("a\nb")
    assert "a\\nb: unknown key '\\x1b[31m'" in refused(inner.finish)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("name: lab\n", "the first key must be 'hetplan: cluster/v1'"),
        ("hetplan: model/v1\n", "this file is 'model/v1', expected 'cluster/v1'"),
        ("hetplan: cluster/v2\n", "version 'cluster/v2' is not known"),
        ("hetplan: 3\n", "this file is '3'"),
        ("hetplan: [cluster/v1]\n", "found a list"),
        ("- a\n", "found a list"),
        ("just words\n", "found 'just words'"),
        (HEADER + "a: 1\na: 2\n", "x.yaml:3:1: key 'a' is already given at line 2"),
        (HEADER + "a: {b: 1, 'b': 2}\n", "key 'b' is already given at line 2"),
        (HEADER + "? [a]\n: 1\n", "a key must be a single word"),
        (HEADER + "a: [1, 2\n", "not valid YAML"),
        (HEADER + "a: 'x\n", "not valid YAML"),
        (HEADER + "\ta: 1\n", "not valid YAML"),
        (HEADER + "a: b: c\n", "not valid YAML"),
        (HEADER + "a: !!python/object/apply:os.system [ls]\n", "is not allowed"),
        (HEADER + "a: !!int 3\n", "is not allowed"),
        (HEADER + "a: !mine {b: 1}\n", "tag '!mine' is not allowed"),
        (HEADER + "---\na: 1\n", "a second document"),
        (HEADER + "a: *x\n", "alias '*x' has no anchor before it"),
        (HEADER + "a: &x [1, *x]\n", "stands inside the value it names"),
        (HEADER + "a: &x {b: &y [*y]}\n", "stands inside the value it names"),
        (HEADER + "a: x\0y\n", "x.yaml:2:5: character U+0000 is not allowed"),
        (HEADER + "a: \x1b[31m\n", "character U+001B is not allowed"),
        (HEADER + "a: \ud800\n", "character U+D800 is not allowed"),
    ],
)
def test_a_document_that_is_not_plain_yaml_is_refused(text, problem):
    assert problem in refused(lambda: document_from_text(text, "x.yaml", "cluster"))


@pytest.mark.parametrize("opening", ["[", "{a: ", "[{a: ", "- ", "? ", "&a [", "a:\n"])
def test_deep_nesting_is_refused(opening):
    refused(lambda: fields("a: " + opening * 100_000))
    refused(lambda: fields(opening * 100_000))


def test_deep_blocks_are_refused():
    deep = "".join(" " * depth + "a:\n" for depth in range(150))
    assert "nested more than" in refused(lambda: fields("b: 1\n" + deep))


def test_an_alias_is_the_value_it_names():
    root = fields("a: &x {n: 1}\nb: *x\nc: [*x, *x]\n")
    assert root.raw("b") == {"n": 1}
    assert root.raw("c") == [{"n": 1}, {"n": 1}]


def test_an_alias_bomb_is_refused_without_expanding_it():
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert f"more than {MAX_NODES:,} values" in refused(lambda: fields("\n".join(lines)))


def test_a_flat_alias_bomb_is_refused():
    body = "a: &a [" + "x, " * 10_000 + "x]\nb: [" + "*a, " * 10_000 + "*a]\n"
    assert f"more than {MAX_NODES:,} values" in refused(lambda: fields(body))


def test_a_byte_that_is_not_utf8_is_located(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(HEADER.encode() + "a: é".encode() + b"\xff\n")
    assert f"{path}:2:5: byte 0xff is not UTF-8 text" in refused(lambda: read_document(path, "cluster"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_are_refused(tmp_path, encoding):
    path = tmp_path / "x.yaml"
    path.write_bytes(HEADER.encode(encoding))
    refused(lambda: read_document(path, "cluster"))


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + HEADER.encode() + b"a: 1\r\n")
    assert read_document(path, "cluster").integer("a") == 1


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert "no such file" in refused(lambda: read_document(tmp_path / "none.yaml", "cluster"))
    assert "directory" in refused(lambda: read_document(tmp_path, "cluster"))
    refused(lambda: read_document(Path("a\0b"), "cluster"))
    refused(lambda: read_document(tmp_path / ("x" * 300), "cluster"))
    refused(lambda: read_document(tmp_path / "bad\nname.yaml", "cluster"))
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    refused(lambda: read_document(loop, "cluster"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(HEADER)
    path.chmod(0)
    assert "permission denied" in refused(lambda: read_document(path, "cluster"))


def test_a_50_megabyte_file_is_refused_by_its_size(tmp_path):
    path = tmp_path / "x.yaml"
    with path.open("wb") as file:
        file.truncate(50_000_000)
    assert "the file is 50 MB large; at most 16 MB" in refused(lambda: read_document(path, "cluster"))


def test_a_megabyte_reads_whole():
    entry = "- {group: a100, first_layer: 10, end_layer: 20, tp: 8, dp: 4, recompute: full, devices: [0, 32]}\n"
    text = "stages:\n" + entry * (1_000_000 // len(entry))
    rows = fields(text).rows("stages")
    total = sum(row.integer("end_layer") - row.integer("first_layer") for row in rows)
    assert total == 10 * len(rows)
