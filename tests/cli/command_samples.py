"""A small cluster and model, and what a command answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CLUSTER = """\
hetplan: cluster/v1
name: small
groups:
  new: {device: A100-SXM4-40GB, nodes: 1, devices_per_node: 2, price: 1.5 USD/h}
  old: {device: V100-SXM2-16GB, nodes: 1, devices_per_node: 2, price: 0.5 USD/h}
networks:
  eth: {joins: [new, old], kind: ethernet, bandwidth: 25 Gbit/s, latency: 30 us}
"""
MODEL = """\
hetplan: model/v1
name: two-layers
config: gpt2
overrides: {n_layer: 2}
"""
SIZES = ["--global-batch", "8", "--seq-len", "256"]


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Hetplan = Callable[..., Answer]


def one_line(answer: Answer) -> str:
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    return answer.err
