"""The model a run trained, from its printed dimensions or its name.

Mixtures need more than a table prints: they come from the catalog by name, with the printed number of layers. Names
with Llama, Mistral, Aquila or Qwen are gated decoders without biases; Nemotron (3rd generation apart, which is no
transformer) has rotary positions and a plain MLP; everything else is a GPT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hetplan.calibrate.runs import Run
from hetplan.catalog.models import find_model_config, model_names
from hetplan.errors import UsageError
from hetplan.specs.importers.hugging_face import model_from_config
from hetplan.specs.model import Model

DEEPSEEK_V2: Mapping[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "moe_layer_freq": 1,
}
"""https://huggingface.co/deepseek-ai/DeepSeek-V2/blob/main/config.json"""
GATED = ("llama", "mistral", "aquila", "qwen")
DEFAULT_VOCAB = 50257
"""GPT-2's, where a table prints none."""
PADDED_TO = 128
"""Trainers pad the vocabulary to a multiple of this times tp (Megatron-LM's default)."""


def model_of(run: Run) -> Model:
    """Return the model of a run.

    Raises:
        UsageError: its dimensions are not given, or it is of a kind that cannot be expressed.
    """
    name = run.model.lower().replace("_", "-")
    if name.startswith(("nemotron-3", "deepseekv4", "deepseek-v4")):
        raise UsageError(f"{run.model}: layers other than attention and MLP cannot be expressed")
    if "moe" in run.ffn:
        return model_from_config(mixture_config(run, name), run.model)
    sizes = [run.integer(column) for column in ("layers", "hidden", "heads", "seq")]
    if any(size is None for size in sizes):
        raise UsageError("the model's dimensions are not all given")
    return model_from_config(dense_config(run, name), run.model)


def mixture_config(run: Run, name: str) -> dict[str, Any]:
    """Return the configuration of a mixture the catalog knows, with the printed number of layers."""
    base = re.sub(r"-trimmed.*", "", name)
    if base == "deepseek-v2":
        config = dict(DEEPSEEK_V2)
    elif base in model_names():
        config = dict(find_model_config(base))
    else:
        raise UsageError(f"{run.model}: a mixture of experts the catalog does not know")
    layers = run.integer("layers")
    return config | ({"num_hidden_layers": layers} if layers else {})


def dense_config(run: Run, name: str) -> dict[str, Any]:
    """Return a configuration with the printed dimensions."""
    hidden, heads = run.integer("hidden") or 1, run.integer("heads") or 1
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": run.integer("layers"),
        "num_attention_heads": heads,
        "vocab_size": padded(run.integer("vocab") or DEFAULT_VOCAB, run.integer("tp") or 1),
        "max_position_embeddings": run.integer("seq"),
    }
    ffn = run.integer("ffn") or 4 * hidden
    if any(word in name for word in GATED):
        kv_heads = run.integer("kv_heads") or heads
        return common | {
            "model_type": "llama",
            "intermediate_size": ffn,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": False,
        }
    if name.startswith("nemotron"):
        return common | {
            "model_type": "gpt_neox",
            "intermediate_size": ffn,
            "tie_word_embeddings": False,
            "use_parallel_residual": False,
        }
    drop = 0.1 if drops_out(run, name) else 0.0
    drops = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    return common | {"model_type": "gpt2", "n_inner": ffn, "tie_word_embeddings": True} | drops


def drops_out(run: Run, name: str) -> bool:
    """Return whether a GPT trains with dropout: trainers' default until 2024; llm-foundry's MPT never."""
    return (run.integer("year") or 2022) < 2025 and not name.startswith("mpt")


def padded(vocab: int, tp: int) -> int:
    """Return the rows of the padded token table."""
    step = PADDED_TO * tp
    return math.ceil(vocab / step) * step
