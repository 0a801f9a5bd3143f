"""What trainers and clusters themselves make of emitted files: their own parsers, run on requests.

Reads requests from stdin, one JSON mapping a line, and answers each with one line: `{"problems": [...], "facts": {}}`.
Run it with an interpreter that has torch; a parser's own source folder, where it needs one, comes with the request:

    {"parser": "megatron", "source": DIR, "arguments": [...], "world_size": 16, "capability": [8, 0], "environment": {}}
    {"parser": "torchtitan", "source": DIR, "folder": DIR, "arguments": [...], "world_size": 16}
    {"parser": "deepspeed", "folder": DIR, "data_parallel": 16}
    {"parser": "flagscale", "source": DIR, "folder": DIR}
    {"parser": "crd", "source": FILE, "document": {...}}
    {"parser": "kubernetes", "document": {...}}
    {"parser": "pytorchjob", "document": {...}}

Where there is no accelerator, what the parsers ask of one (its compute capability) is answered by the request, and what
only Transformer Engine brings (fused rotary embedding) counts as there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def check_megatron(request: dict[str, Any]) -> Facts:
    """Megatron-LM's own parser and validation; facts: layers each (virtual) stage builds, and settings of note."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    _first_on_path(request["source"])
    import torch

    capability = tuple(request.get("capability", (8, 0)))
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=capability[0], minor=capability[1])
    from megatron.core import parallel_state
    from megatron.core.transformer import transformer_block
    from megatron.training import argument_utils, arguments

    rope = sys.modules["megatron.core.models.common.embeddings.rope_utils"]
    if getattr(rope, "fused_apply_rotary_pos_emb", None) is None:
        rope.fused_apply_rotary_pos_emb = object()
    environment = {"WORLD_SIZE": str(request["world_size"]), "RANK": "0", **request.get("environment", {})}
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS",):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = ["pretrain_gpt.py", *request["arguments"]]
    parsed = arguments.parse_args()
    arguments.validate_args(parsed)
    config = argument_utils.core_transformer_config_from_args(parsed)
    pp, vpp = parsed.pipeline_model_parallel_size, parsed.virtual_pipeline_model_parallel_size
    layers = []
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    for v in range(vpp or 1):
        for p in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(p)
            layers.append(transformer_block.get_num_layers_to_build(config, vp_stage=v if vpp else None, pp_rank=p))
    return {
        "layers": layers,
        "data_parallel_size": parsed.data_parallel_size,
        "hidden_dropout": parsed.hidden_dropout,
        "fp32_gradients": bool(parsed.accumulate_allreduce_grads_in_fp32),
        "transformer_impl": parsed.transformer_impl,
    }


def check_torchtitan(request: dict[str, Any]) -> Facts:
    """torchtitan's configuration manager and mesh; facts: modules of each part, tokens a step."""
    for name in [name for name in sys.modules if name == "hetplan_titan"]:
        del sys.modules[name]
    _first_on_path(request["source"])
    _first_on_path(request["folder"])
    os.environ.update(request.get("environment", {}))
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = ConfigManager().parse_args(request["arguments"])
    dims = ParallelDims.from_config(config.parallelism, request["world_size"])
    degree = dims.dp_replicate * dims.dp_shard
    microbatches = config.parallelism.num_pp_microbatches if dims.pp > 1 else 1
    rank_tokens = config.training.num_tokens_per_microbatch_per_dp_rank * microbatches
    if config.training.num_tokens_per_train_step % (rank_tokens * degree):
        raise ValueError(
            "tokens a step are no multiple of the tokens of all data-parallel ranks (torchtitan/trainer.py)"
        )
    parts = config.parallelism.module_fqns_per_model_part
    layers = len(config.model_spec.model.layers)
    whole = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "lm_head"]
    if parts is not None and [name for part in parts for name in part] != whole:
        raise ValueError(f"parts do not hold the model's modules once each, in order ({layers} layers)")
    return {"parts": [len(part) for part in parts or ()], "layers": layers}


def check_deepspeed(request: dict[str, Any]) -> Facts:
    """DeepSpeed's configuration class and hostfile reader; facts: slots by node, ZeRO stage, batch."""
    from deepspeed.launcher import runner
    from deepspeed.runtime import config as configuration

    size = request["data_parallel"]
    configuration.dist = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: size)
    mesh = types.SimpleNamespace(get_data_parallel_world_size=lambda: size)
    folder = Path(request["folder"])
    found = configuration.DeepSpeedConfig(str(folder / "ds_config.json"), mpu=mesh)
    return {
        "slots": dict(runner.fetch_hostfile(str(folder / "hostfile"))),
        "zero": found.zero_optimization_stage,
        "batch": found.train_batch_size,
    }


def check_flagscale(request: dict[str, Any]) -> Facts:
    """FlagScale's own rules of heterogeneous settings, its hostfile reader and its flags; facts: ranks and slots."""
    _first_on_path(request["source"])
    import torch
    import yaml

    torch.distributed.get_rank = lambda *_: 0
    from flagscale.runner.utils import flatten_dict_to_args, parse_hostfile
    from flagscale.train.arguments import FSTrainArguments

    train = yaml.safe_load((Path(request["folder"]) / "train-hetero.yaml").read_text())
    flat: dict[str, Any] = {}
    for section in (train["system"], train["system"]["hetero"], train["system"]["precision"], train["model"]):
        flat |= {name: value for name, value in section.items() if not isinstance(value, dict)}
    defaults = dict.fromkeys(
        ("expert_tensor_parallel_size_per_process_mesh", "num_layers_per_virtual_pipeline_stage", "mtp_num_layers")
    )
    flat.setdefault("untie_embeddings_and_output_weights", False)
    flat.setdefault("use_partial_reduce_for_shared_embedding", False)
    flat.setdefault("recompute_granularity_per_stage_micro_batch", None)
    flat.setdefault("recompute_method_per_stage_micro_batch", None)
    flat.setdefault("recompute_num_layers_per_stage_micro_batch", None)
    mapper = types.SimpleNamespace(to_logical_ranks=lambda ranks: ranks)
    arguments = FSTrainArguments(types.SimpleNamespace(**defaults, **flat), rank_mapper=mapper)
    arguments.pre_validate_args()
    ranks = [tp * cp * dp * pp for tp, cp, _, dp, pp in arguments.args.hetero_process_meshes]
    slots = {node: entry["slots"] for node, entry in parse_hostfile(str(Path(request["folder"]) / "hostfile")).items()}
    if sum(slots.values()) != sum(ranks):
        raise ValueError(f"the hostfile has {sum(slots.values())} slots, the meshes {sum(ranks)} ranks")
    flags = flatten_dict_to_args({**train["system"], **train["model"], **train["data"]}, [])
    return {"ranks": ranks, "slots": slots, "flags": [flag for flag in flags if flag.startswith("--")]}


def check_crd(request: dict[str, Any]) -> Facts:
    """A custom resource against the schema of its definition, fields it does not know refused."""
    import jsonschema
    import yaml

    definition = yaml.safe_load(Path(request["source"]).read_text())
    version = request["document"]["apiVersion"].split("/")[1]
    schema = next(v for v in definition["spec"]["versions"] if v["name"] == version)["schema"]["openAPIV3Schema"]
    validator = jsonschema.Draft7Validator(_strict(schema))
    problems = [f"{'.'.join(map(str, e.path))}: {e.message[:300]}" for e in validator.iter_errors(request["document"])]
    if problems:
        raise ValueError("; ".join(problems))
    return {}


def _strict(schema: Any) -> Any:
    """Return a structural schema that refuses unknown fields, as the API server does."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found = {"type": ["integer", "string"]}
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and isinstance(schema["properties"], dict) and not open_ended and "type" in schema:
        found["additionalProperties"] = False
    return found


def check_kubernetes(request: dict[str, Any]) -> Facts:
    """A core Kubernetes object against the published schemas."""
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(request["document"], version, strict=True)
    return {"version": version}


def check_pytorchjob(request: dict[str, Any]) -> Facts:
    """A PyTorchJob read into the classes of Kubeflow's own package, none of its fields lost."""
    from kubeflow.training import models
    from kubernetes import client

    api = client.ApiClient()
    known = {name: getattr(models, name) for name in dir(models) if name[0].isupper()}
    for name, found in known.items():
        setattr(client.models, name, found)
    job = api._ApiClient__deserialize(request["document"], "KubeflowOrgV1PyTorchJob")
    back = api.sanitize_for_serialization(job)
    if _quantities_as_texts(back) != _quantities_as_texts(request["document"]):
        raise ValueError(f"fields are lost: read back as {json.dumps(back)[:2000]}")
    return {"replicas": {name: part["replicas"] for name, part in back["spec"]["pytorchReplicaSpecs"].items()}}


def _quantities_as_texts(value: Any) -> Any:
    """Return a document whose numbers are texts: the classes keep resource quantities so."""
    if isinstance(value, dict):
        return {key: _quantities_as_texts(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quantities_as_texts(part) for part in value]
    return str(value)


def _first_on_path(folder: str) -> None:
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


PARSERS: dict[str, Callable[[dict[str, Any]], Facts]] = {
    "megatron": check_megatron,
    "torchtitan": check_torchtitan,
    "deepspeed": check_deepspeed,
    "flagscale": check_flagscale,
    "crd": check_crd,
    "kubernetes": check_kubernetes,
    "pytorchjob": check_pytorchjob,
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a parser says; whatever it raises is its answer."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            facts = PARSERS[request["parser"]](request)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a parser raises is its answer
        tail = said.getvalue().strip().splitlines()[-3:] if isinstance(error, SystemExit) else []
        return {"problems": [" ".join([f"{type(error).__name__}: {error}", *tail])[:3000]], "facts": {}}
    return {"problems": [], "facts": facts}


def main() -> None:
    """Answer every request of stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        if line.strip():
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
