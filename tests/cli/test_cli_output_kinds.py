"""A result never takes the place of an input of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cli.output import write_whole
from hetplan.errors import UsageError

CLUSTER = "# a comment first\nhetplan: cluster/v1\nname: lab\n"


@pytest.mark.parametrize("text", ["hetplan: plan/v1\n", "<?xml version='1.0'?>\n", '{"displayTimeUnit": "ms"}\n'])
def test_a_spec_is_not_replaced_by_another_kind_of_document(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(CLUSTER)
    with pytest.raises(UsageError, match="it is a cluster file, which this would destroy"):
        write_whole(path, text)
    assert path.read_text() == CLUSTER
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_is_replaced_by_one_of_its_kind_and_other_files_by_anything(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    for text in ("notes\n", CLUSTER, "hetplan: cluster/v1\nname: other\n"):
        write_whole(path, text)
        assert path.read_text() == text
