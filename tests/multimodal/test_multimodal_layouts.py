"""Layouts of modules: a published 17-rank job, and the rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from modular_jobs import cluster_of, data_of, job, model_of

from hetplan.plan.module_time import estimate_modules
from hetplan.plan.modules import ModuleLayout, Placement, check_modules, units_of

QWEN_VL_27B = """
name: qwen-vl-27b
config:
  model_type: qwen3_vl
  tie_word_embeddings: false
  vision_config:
    {hidden_size: 1152, intermediate_size: 4304, depth: 27, num_heads: 16, patch_size: 16, spatial_merge_size: 2,
     out_hidden_size: 5120, deepstack_visual_indexes: []}
  text_config:
    {model_type: qwen3_vl_text, hidden_size: 5120, intermediate_size: 17408, num_hidden_layers: 64,
     num_attention_heads: 24, num_key_value_heads: 4, head_dim: 256, vocab_size: 248320}
"""
ENCODER = ("vision", "projector")
LANGUAGE = Placement(modules=("language",), group="g", tp=4, pp=2, dp=2)
IMAGES = Placement(modules=ENCODER, group="g", first_rank=16)


def layout(samples: int = 2, batch: int = 64) -> ModuleLayout:
    return ModuleLayout(placements=(IMAGES, LANGUAGE), num_microbatches=batch // samples, samples=samples)


def test_seventeen_ranks_keep_every_rule() -> None:
    model = model_of(QWEN_VL_27B)
    assert units_of(model) == (ENCODER, ("language",))
    assert check_modules(layout(), model, cluster_of(3)) == ()
    assert layout().world_size == 17
    assert [placement.first_rank for placement in layout().placements] == [16, 0]


@pytest.mark.parametrize(
    ("broken", "rule", "words"),
    [
        (
            replace(layout(), placements=(replace(IMAGES, first_rank=15), LANGUAGE)),
            "ranks apart or shared",
            "its ranks 0-15 overlap ranks 15-15 of vision\\+projector",
        ),
        (layout(samples=1), "dp divides the microbatch", "of 1 samples is not divisible by its language dp 2"),
        (replace(layout(), placements=(LANGUAGE,)), "every module once", "look at projector, vision"),
        (
            replace(layout(), placements=(IMAGES, replace(LANGUAGE, tp=3))),
            "degrees divide the model",
            "tp 3 does not divide",
        ),
        (
            replace(layout(), placements=(IMAGES, replace(LANGUAGE, pp=80))),
            "stages have layers",
            "pp 80 is more than its 66 layers",
        ),
        (
            replace(layout(), placements=(IMAGES, replace(LANGUAGE, cut=(30, 30)))),
            "the cut holds all layers",
            r"30\+30 is not 2 stages of 66 layers",
        ),
        (
            replace(layout(4), placements=(replace(IMAGES, dp=4, tp=4), LANGUAGE)),
            "devices of a group",
            "32 ranks on group 'g', which has 24 devices",
        ),
    ],
)
def test_each_rule_is_broken_alone(broken: ModuleLayout, rule: str, words: str) -> None:
    violations = check_modules(broken, model_of(QWEN_VL_27B), cluster_of(3))
    assert any(violation.rule == rule for violation in violations)
    with pytest.raises(AssertionError, match=words):
        assert not violations, [str(violation) for violation in violations]


def test_an_encoder_on_its_own_rank_gains_what_was_measured() -> None:
    """Megatron-Bridge's tutorial measured 28-35 % (768 x 768 images, 2,048 tokens, batch 32 and 64).

    https://github.com/NVIDIA-NeMo/Megatron-Bridge, tutorials/megatron_mimo/qwen35-vl-non-colocated-sft.md. Its 16-rank
    job runs the encoder whole on every tp rank of the first stage, the language layers cut in halves.
    """
    text = "sources: [{text: {constant: 1472}, image: {tokens: {constant: 576}}}]\nreads: {vision: image}"
    prices, draws = job(cluster_of(3), model_of(QWEN_VL_27B), data_of(text), batch=64, draws=2)
    joint = Placement(
        modules=(*ENCODER, "language"), group="g", tp=4, pp=2, dp=2, repeated=ENCODER, cut=(28 + 1 + 33, 33)
    )
    before = ModuleLayout(placements=(joint,), num_microbatches=32, samples=2)
    assert check_modules(before, prices.prices.model, prices.prices.cluster) == ()
    apart, together = (estimate_modules(one, prices, draws) for one in (layout(), before))
    assert apart.fits
    assert 0.15 <= 1 - apart.step_s / together.step_s <= 0.40
    split = estimate_modules(replace(before, placements=(replace(joint, repeated=()),)), prices, draws)
    assert apart.step_s < split.step_s < together.step_s
