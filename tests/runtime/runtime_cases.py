"""Small models of each family and layouts of every kind, to be trained and compared with a single process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.importers.hugging_face import model_from_config
from hetplan.specs.model import Model

VOCAB = 67
first_value_seed = 11

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 24, "n_head": 4, "n_layer": 8, "n_positions": 32},
    "gpt2-4": {"model_type": "gpt2", "n_embd": 24, "n_head": 4, "n_layer": 4, "n_positions": 32},
    "llama": {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "hidden_size": 24,
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}


@lru_cache
def model_of(name: str) -> Model:
    """A small model by name."""
    return model_from_config({"vocab_size": VOCAB, **CONFIGS[name]}, name)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a small model."""

    model: str
    layout: Layout
    seq_len: int = 16
    precision: str = "fp32"
    sequence_parallel: bool = True
    clip_norm: float = 0.5
    channels: bool = False
    """Messages go by groups of two, as NCCL needs them."""


def sample_rows(case: Case, step: int) -> np.ndarray:
    """The samples of a step: skewed, so that replicas see different words."""
    random = np.random.default_rng(1000 + step)
    samples = random.zipf(1.3, size=(case.layout.num_samples, case.seq_len + 1)) % VOCAB
    return samples.astype(np.int64)


def stages(cut: str, *, total: int, tp: str = "", recompute: str = "", **fields: Any) -> tuple[Stage, ...]:
    """Stages by their decoder layers, ``5+3``; the first also holds the embedding, the last the head."""
    counts = [int(word) for word in cut.split("+")]
    assert sum(counts) == total
    degrees = [int(word) for word in tp.split("+")] if tp else [1] * len(counts)
    again = recompute.split("+") if recompute else ["none"] * len(counts)
    found, first = [], 0
    for i, count in enumerate(counts):
        end = first + count + (i == 0) + (i == len(counts) - 1)
        found.append(
            Stage(group="a", first_layer=first, end_layer=end, tp=degrees[i], recompute=again[i], **fields)  # type: ignore[arg-type]
        )
        first = end
    return tuple(found)


def replica(
    model: str, cut: str, *, mb: int = 1, count: int = 3, copies: int = 1, vpp: int = 1, **words: Any
) -> Replica:
    """A replica of a small model."""
    total = sum(layer.kind == "decoder" for layer in model_of(model).chain)
    return Replica(
        stages=stages(cut, total=total, **words), microbatch=mb, num_microbatches=count, copies=copies, vpp=vpp
    )


def case(model: str, *replicas: Replica, schedule: str = "1f1b", sharding: str = "none", **fields: Any) -> Case:
    """A case with these replicas."""
    layout = Layout(replicas=replicas, schedule=schedule, sharding=sharding)  # type: ignore[arg-type]
    return Case(model=model, layout=layout, **fields)
