"""The operator form says what the cost model needs, in the order work runs."""

from collections import Counter

import pytest

from hetplan.catalog.models import find_model, model_names
from hetplan.specs.importers.hugging_face import model_from_config
from hetplan.specs.model import Activation, Attention, Experts, Linear, Loss, Norm, Table


def layers_of(model, kind):
    return [layer for layer in model.chain if layer.kind == kind]


def find(layer, kind):
    return [operator for operator in layer.operators if isinstance(operator, kind)]


def test_llama_block_runs_in_order():
    block = layers_of(find_model("llama-3.1-8b"), "decoder")[0]
    assert [operator.name for operator in block.operators] == [
        "attention_norm", "q", "k", "v", "attention", "output", "mlp_norm", "gate", "up", "activation", "down",
    ]  # fmt: skip
    widths = {linear.name: (linear.inputs, linear.outputs, linear.split) for linear in find(block, Linear)}
    assert widths == {
        "q": (4096, 4096, "column"),
        "k": (4096, 1024, "column"),
        "v": (4096, 1024, "column"),
        "output": (4096, 4096, "row"),
        "gate": (4096, 14336, "column"),
        "up": (4096, 14336, "column"),
        "down": (14336, 4096, "row"),
    }
    assert [linear.name for linear in find(block, Linear) if linear.reads_new_input] == ["q", "output", "gate", "down"]


def test_equal_layers_are_one_object():
    blocks = layers_of(find_model("llama-3.1-70b"), "decoder")
    assert len(blocks) == 80
    assert len({id(block) for block in blocks}) == 1


def test_chain_starts_with_the_embedding_and_ends_with_the_loss():
    for name in model_names():
        language = find_model(name).modules[-1]
        assert language.layers[0].kind == "embedding"
        assert isinstance(language.layers[0].operators[0], Table)
        assert language.layers[-1].kind == "head"
        assert isinstance(language.layers[-1].operators[-1], Loss)


def test_consecutive_operators_fit():
    """What a linear reads, the operator that feeds it wrote."""
    for name in model_names():
        for layer in dict.fromkeys(find_model(name).chain):
            previous = layer.width
            for operator in layer.operators:
                if isinstance(operator, Linear) and operator.split == "row":
                    assert operator.inputs == previous, (name, layer.name, operator.name)
                if isinstance(operator, Attention):
                    previous = operator.num_heads * operator.value_head_dim
                if isinstance(operator, Activation):
                    previous = operator.width


@pytest.mark.parametrize(("tied", "counted"), [(True, 0), (False, 8 * 100)])
def test_tied_head_counts_once(tied, counted):
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16,
              "num_hidden_layers": 1, "vocab_size": 100, "tie_word_embeddings": tied}  # fmt: skip
    head = model_from_config(config, "tiny").chain[-1]
    (logits,) = find(head, Linear)
    assert logits.tied is tied
    assert logits.inputs * logits.outputs * (not tied) == counted


def test_gpt2_trains_with_dropout_and_llama_without():
    assert all(layer.dropout for layer in layers_of(find_model("gpt2"), "decoder"))
    assert not any(layer.dropout for layer in find_model("llama-2-7b").chain)
    config = {"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0.0, "attn_pdrop": 0}
    assert not any(layer.dropout for layer in model_from_config(config, "gpt2").chain)


def test_windows_follow_each_family():
    def windows(config):
        chain = model_from_config(
            {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, **config}, "x"
        ).chain
        return [find(layer, Attention)[0].window for layer in chain if layer.kind == "decoder"]

    assert windows({"model_type": "mistral", "num_hidden_layers": 2}) == [4096, 4096]
    assert windows({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}) == [None, None]
    assert windows({"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 8}) == [8, None, 8, None]
    gemma3 = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8}
    assert windows(gemma3) == [8, 8, 8, 8, 8, None, 8]
    assert windows({**gemma3, "sliding_window_pattern": 2}) == [8, None, 8, None, 8, None, 8]
    qwen = {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 2}
    assert windows(qwen) == [None, None, None]
    assert windows({**qwen, "use_sliding_window": True}) == [None, None, 8]
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows({**qwen, "use_sliding_window": True, "layer_types": types}) == [8, None, None]


def test_deepseek_has_dense_layers_first_and_shares_experts():
    model = find_model("deepseek-v3")
    names = Counter(layer.name for layer in layers_of(model, "decoder"))
    assert names == {"decoder.dense": 3, "decoder.experts": 58}
    assert [layer.name for layer in layers_of(model, "decoder")][:4] == ["decoder.dense"] * 3 + ["decoder.experts"]
    block = layers_of(model, "decoder")[-1]
    (experts,) = find(block, Experts)
    assert (experts.num_experts, experts.top_k, experts.router.split) == (256, 8, "none")
    assert [(linear.inputs, linear.outputs) for linear in experts.linears] == [(7168, 2048), (7168, 2048), (2048, 7168)]
    shared = [linear for linear in find(block, Linear) if linear.name.startswith("shared")]
    assert [(linear.outputs, linear.reads_new_input) for linear in shared] == [
        (2048, False),
        (2048, False),
        (7168, True),
    ]
    (attention,) = find(block, Attention)
    assert (attention.num_heads, attention.qk_head_dim, attention.value_head_dim) == (128, 192, 128)


def test_qwen_moe_layers_follow_step_and_exceptions():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    names = [layer.name for layer in layers_of(model_from_config(config, "x"), "decoder")]
    assert [name == "decoder.experts" for name in names] == [False, True, False, False, False, True]


def test_query_and_key_norms_run_on_split_heads():
    block = layers_of(find_model("qwen3-32b"), "decoder")[0]
    norms = {norm.name: norm for norm in find(block, Norm)}
    assert (norms["q_norm"].width, norms["q_norm"].params, norms["q_norm"].sharded) == (64 * 128, 128, True)
    assert (norms["k_norm"].width, norms["k_norm"].params) == (8 * 128, 128)
    assert not norms["attention_norm"].sharded


def test_llava_is_a_graph_of_three_modules():
    model = find_model("llava-1.5-7b")
    assert [module.name for module in model.modules] == ["vision", "projector", "language"]
    assert model.edges == (("vision", "projector"), ("projector", "language"))
    vision, projector, language = model.modules
    assert {layer.tokens_per_sample for layer in vision.layers} == {24 * 24 + 1}
    assert {layer.kind for layer in vision.layers[1:]} == {"encoder"}
    assert len(vision.layers) == 25
    assert not any(attention.causal for layer in vision.layers for attention in find(layer, Attention))
    assert [layer.tokens_per_sample for layer in projector.layers] == [24 * 24]
    assert {layer.tokens_per_sample for layer in language.layers} == {None}


def test_qwen_vl_tower_takes_the_image_size_it_is_given():
    assumed = find_model("qwen2.5-vl-7b")
    assert "assumed" in assumed.sources["vision_config.image_size"]
    assert {layer.tokens_per_sample for layer in assumed.modules[0].layers} == {32 * 32}
    assert assumed.modules[1].layers[0].tokens_per_sample == 16 * 16
    windows = [find(layer, Attention)[0].window for layer in assumed.modules[0].layers[1:]]
    assert [index for index, window in enumerate(windows) if window is None] == [7, 15, 23, 31]
    assert windows[0] == 8 * 8


def test_sizes_a_file_leaves_out_are_listed():
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    sources = model_from_config(config, "x").sources
    assert "default" in sources["text_config.hidden_size"]
    assert "text_config.vocab_size" not in sources
