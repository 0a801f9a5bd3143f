"""Audio-language models: counts of the published checkpoint, and tokens through the graph."""

from __future__ import annotations

import numpy as np
from modular_jobs import cluster_of, data_of, job, model_of

from hetplan.costs.samples import draw_samples, module_features
from hetplan.plan.modules import units_of
from hetplan.search.modules import ModuleRequest, search_modules
from hetplan.specs.model import layer_params, model_params

# https://huggingface.co/Qwen/Qwen2-Audio-7B/blob/main/config.json
QWEN2_AUDIO = """
name: qwen2-audio-7b
config:
  model_type: qwen2_audio
  audio_config: {d_model: 1280, encoder_layers: 32, encoder_attention_heads: 20, encoder_ffn_dim: 5120,
    num_mel_bins: 128}
  text_config: {model_type: qwen2, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32,
    num_attention_heads: 32, num_key_value_heads: 32, vocab_size: 156032}
"""


def test_parameters_are_those_of_the_checkpoint() -> None:
    model = model_of(QWEN2_AUDIO)
    assert model_params(model) == 8_397_094_912
    assert sum(layer_params(layer) for layer in model.modules[0].layers) == 636_968_960
    assert units_of(model) == (("audio", "projector"), ("language",))


def test_clips_become_frames_encoder_tokens_and_half_as_many_at_the_language_model() -> None:
    model = model_of(QWEN2_AUDIO)
    assert [layer.tokens_per_sample for layer in model.modules[0].layers[:3]] == [3000, 1500, 1500]
    data = data_of("sources: [{text: {constant: 50}, audio: {tokens: {constant: 750}}}]")
    features = module_features(model, data, draw_samples(data, 4, 0))
    assert np.unique(features["audio"][:, 1]).tolist() == [1500.0]
    assert np.unique(features["projector"][:, 1]).tolist() == [750.0]
    assert np.unique(features["language"][:, 1]).tolist() == [800.0]


def test_it_is_planned_like_any_other() -> None:
    data = data_of("sources: [{text: {constant: 50}, audio: {tokens: {constant: 750}}}]")
    prices, draws = job(cluster_of(1), model_of(QWEN2_AUDIO), data, batch=16, draws=2)
    found = search_modules(prices, draws, ModuleRequest(global_batch=16, recompute=("none",), pp=(1, 2)))
    assert found.proved
    assert found.estimate.fits
