"""Costs of modules from token counts, frozen and adapter-trained modules, and samples drawn from data."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from modular_jobs import cluster_of, data_of, job, model_of

from hetplan.costs.prices import price
from hetplan.costs.records import ShardDegrees, StageOption
from hetplan.costs.samples import draw_samples, module_features, packed_samples
from hetplan.errors import SpecError, UsageError
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.calibration import Calibration
from hetplan.specs.data import Constant, Data, Packing, Row
from hetplan.specs.model import Model, layer_params
from hetplan.specs.training import how_trained, parse_rule, with_training
from hetplan.specs.workload import Workload

VLM = """
name: vlm
config:
  model_type: llava
  vision_config: {model_type: clip_vision_model, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 24,
    num_attention_heads: 16, patch_size: 14, image_size: 336}
  text_config: {model_type: llama, hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 16,
    num_attention_heads: 16, vocab_size: 32000}
"""
IMAGES = "sources: [{text: {constant: 448}, image: {count: {constant: 2}, tokens: {constant: 576}}}]"


def costs_of(model: Model, group: str = "g"):  # type: ignore[no-untyped-def]
    workload = Workload(seq_len=1024, global_batch=8)
    return price(cluster_of(1), model, workload, Calibration()).layers(StageOption(group=group, samples=4))


def layer_range(model: Model, name: str) -> slice:
    first = 0
    for module in model.modules:
        if module.name == name:
            return slice(first, first + len(module.layers))
        first += len(module.layers)
    raise AssertionError(name)


@pytest.mark.parametrize("tokens", [4096, 16384, 60000])
def test_a_line_says_what_the_cost_model_says(tokens: int) -> None:
    model = model_of(VLM)
    prices, _ = job(cluster_of(1), model, data_of(IMAGES), batch=4, draws=2)
    language = next(module for module in model.modules if module.name == "language")
    alone = Model(name="alone", modules=(language,))
    direct = price(cluster_of(1), alone, Workload(seq_len=tokens, global_batch=1), Calibration())
    costs = direct.layers(StageOption(group="g", samples=1, tp=2))
    line = prices.costs("language", "g", 2)
    features = np.array([1.0, tokens, float(tokens) ** 2])
    assert float(line.forward.at(features)) == pytest.approx(float(costs.forward_total_s.sum()), rel=0.03)
    assert float(line.backward.at(features)) == pytest.approx(float(costs.backward_total_s.sum()), rel=0.03)
    assert float(line.saved_bytes.at(features)) == pytest.approx(float(costs.saved_bytes.sum()), rel=0.03)


def test_attention_grows_with_squares_and_the_rest_with_tokens() -> None:
    prices, _ = job(cluster_of(1), model_of(VLM), data_of(IMAGES), batch=4, draws=2)
    forward = prices.costs("language", "g", 1).forward
    one_long = float(forward.at(np.array([1.0, 32768.0, 32768.0**2])))
    many_short = float(forward.at(np.array([32.0, 32768.0, 32 * 1024.0**2])))
    assert one_long - many_short == pytest.approx(forward.per_square * (32768.0**2 - 32 * 1024.0**2))
    assert one_long > 1.3 * many_short
    assert float(forward.at(np.zeros(3))) == 0.0


def test_a_frozen_encoder_runs_forward_only_and_a_frozen_middle_passes_gradients_on() -> None:
    model = model_of(VLM)
    whole = costs_of(model)
    frozen = with_training(model, {"vision": parse_rule("frozen"), "language": parse_rule("frozen")})
    costs = costs_of(frozen)
    vision, language = layer_range(model, "vision"), layer_range(model, "language")
    assert costs.forward_s == pytest.approx(whole.forward_s)
    assert not costs.backward_total_s[vision].any()
    assert not costs.saved_bytes[vision].any()
    assert costs.backward_s[language] == pytest.approx((whole.backward_s - whole.weight_gradient_s)[language])
    assert costs.backward_s[language].sum() > 0.4 * whole.backward_s[language].sum()
    assert not costs.params[language].any()
    assert costs.frozen_params[language] == pytest.approx(whole.params[language])
    assert [how_trained(module) for module in frozen.modules] == ["frozen", "full", "frozen"]


def test_frozen_weights_take_no_gradient_and_no_state() -> None:
    model = model_of(VLM)
    frozen = with_training(model, {"vision": parse_rule("frozen"), "language": parse_rule("frozen")})
    option, span = StageOption(group="g", samples=1), (0, len(model.chain))
    workload = Workload(seq_len=1024, global_batch=8)
    use, full = (
        price(cluster_of(1), one, workload, Calibration()).memory(option, span, 1, "none", ShardDegrees())
        for one in (frozen, model)
    )
    assert use.weights_bytes == full.weights_bytes
    trained = sum(layer_params(layer) for layer in model.chain[layer_range(model, "projector")])
    assert use.gradients_bytes == 2 * trained
    assert use.optimizer_bytes == 12 * trained


def test_adapters_train_beside_frozen_weights() -> None:
    model = model_of(VLM)
    small = with_training(model, {"language": parse_rule("lora(16)")})
    costs, whole = costs_of(small), costs_of(model)
    language = layer_range(model, "language")
    decoder = language.start + 1
    linears = {"q": (2048, 2048), "k": (2048, 2048), "v": (2048, 2048), "o": (2048, 2048)}
    mlp = [(2048, 5632), (2048, 5632), (5632, 2048)]
    assert costs.params[decoder] == sum(16 * (a + b) for a, b in [*linears.values(), *mlp])
    assert costs.forward_s[decoder] > whole.forward_s[decoder]
    assert costs.backward_s[decoder] < whole.backward_s[decoder]
    assert layer_params(small.chain[decoder]) == layer_params(model.chain[decoder])


def test_rules_of_training_are_read_and_refused() -> None:
    model = model_of(VLM + "train: {vision: frozen, language: lora(8)}")
    assert [how_trained(module) for module in model.modules] == ["frozen", "full", "lora"]
    for text, words in (
        ("train: {vison: frozen}", "there is no module 'vison'"),
        ("train: {vision: half}", "is no way to train a module"),
        ("train: {vision: frozen, projector: frozen, language: frozen}", "nothing is left to train"),
    ):
        with pytest.raises(SpecError, match=words):
            model_of(VLM + text)


def cut_of(seconds: np.ndarray, stages: int) -> list[int]:
    """Ends of the cut with the least largest stage, by plain dynamic programming."""
    count, edges = len(seconds), np.concatenate([[0.0], np.cumsum(seconds)])
    best = {(0, 0): (0.0, [0])}
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            options = [
                (max(best[stage - 1, first][0], edges[end] - edges[first]), [*best[stage - 1, first][1], end])
                for first in range(stage - 1, end)
                if (stage - 1, first) in best
            ]
            best[stage, end] = min(options)
    return best[stages, count][1]


def test_the_true_backward_pass_moves_the_cut_and_shortens_the_step() -> None:
    model = model_of(VLM + "train: {vision: frozen}")
    images = 8
    modules = tuple(
        replace(
            module,
            layers=tuple(
                replace(layer, tokens_per_sample=images * layer.tokens_per_sample) if layer.tokens_per_sample else layer
                for layer in module.layers
            ),
        )
        for module in model.modules
    )
    model = replace(model, modules=modules)
    prices = price(cluster_of(1, per_node=4), model, Workload(seq_len=4096, global_batch=16), Calibration())
    costs = prices.layers(StageOption(group="g", samples=1))
    steps = []
    cuts = (cut_of(3 * costs.forward_total_s, 4), cut_of(costs.forward_total_s + costs.backward_total_s, 4))
    for cut in cuts:
        stages = tuple(
            Stage(group="g", first_layer=first, end_layer=end, devices=((place, place + 1),))
            for place, (first, end) in enumerate(pairwise(cut))
        )
        steps.append(
            estimate(Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=16),)), prices).step_s
        )
    assert cuts[0] != cuts[1]
    assert steps[1] < 0.97 * steps[0]


def test_lengths_become_what_modules_do() -> None:
    model = model_of(VLM)
    data = Data(name="x", rows=(Row(text=100, items={"image": (576, 576)}), Row(text=50)))
    samples = draw_samples(data, 400, 0)
    features = module_features(model, data, samples)
    with_images = features["vision"][:, 0] > 0
    assert 0.4 < with_images.mean() < 0.6
    assert set(features["vision"][with_images, 1]) == {2 * 577.0}
    assert set(features["projector"][with_images, 1]) == {1152.0}
    assert set(features["language"][:, 1]) == {1252.0, 50.0}
    assert set(features["language"][:, 2]) == {1252.0**2, 2500.0}


def test_packing_joins_samples_and_keeps_documents_apart() -> None:
    rows = tuple(Row(text=tokens) for tokens in (600, 500, 400, 300, 200))
    data = Data(name="x", rows=rows)
    drawn = draw_samples(data, 64, 1)
    for attention, square in (("document", None), ("sequence", True)):
        packed = packed_samples(drawn, Packing(tokens=1000, attention=attention))  # type: ignore[arg-type]
        assert packed.language_sf[:, 1].max() <= 1000
        assert packed.language_sf[:, 1].sum() == drawn.language_sf[:, 1].sum()
        assert packed.num_samples < 40
        whole = packed.language_sf[:, 1] ** 2
        assert (packed.language_sf[:, 2] == whole).all() if square else (packed.language_sf[:, 2] <= whole).all()
    sequences = draw_samples(replace(data, packing=Packing(tokens=1000)), 10, 2)
    assert sequences.num_samples == 10
    assert sequences.language_sf[:, 1].mean() > 750


def test_the_same_seed_draws_the_same_samples() -> None:
    data = data_of("sources: [{text: {lognormal: {median: 200, sigma: 1.0}}}]")
    first, second, other = (draw_samples(data, 2000, seed).text_s for seed in (0, 0, 1))
    assert (first == second).all()
    assert (first != other).any()
    assert np.median(first) == pytest.approx(200, rel=0.1)
    assert np.std(np.log(first)) == pytest.approx(1.0, rel=0.1)


def test_an_unclear_encoder_is_asked_about() -> None:
    model = model_of(VLM)
    data = data_of("sources: [{text: {constant: 1}, photo: {tokens: {constant: 5}}, sound: {tokens: {constant: 5}}}]")
    with pytest.raises(UsageError, match="could read photo, sound"):
        module_features(model, data, draw_samples(data, 4, 0))
    stated = replace(data, reads={"vision": "photo"})
    assert set(module_features(model, stated, draw_samples(stated, 4, 0))["projector"][:, 1]) == {5.0}


def test_a_constant_is_constant() -> None:
    data = data_of("sources: [{text: {constant: 7}}]")
    assert data.sources[0].text == Constant(value=7)
    assert set(draw_samples(data, 9, 0).text_s) == {7.0}
