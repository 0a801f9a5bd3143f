"""`hetplan import` from the outside: what it prints, writes and refuses."""

import json
import stat

import pytest
import yaml
from import_samples import FULL_QUERY, LABELS, NVLINK_STATUS, PARTITIONS, QUERY, SCONTROL, SYSFS, TOPO_FUSED, TOPO_NICS
from test_import_layouts import CLUSTER, FLAGSCALE, HEXISCALE
from test_import_links import P4DE

from hetplan.catalog.load import load_calibration, load_cluster, load_model
from hetplan.cli.here import QUERY as QUERY_KEYS
from hetplan.cli.main import run
from hetplan.plan.read_plan import read_plan
from hetplan.specs.model import model_params

# https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0/blob/main/config.json, fields that shape the model
TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


@pytest.fixture
def hetplan(capsys, monkeypatch, tmp_path):
    """Runs `hetplan import` in a folder of its own; a text given for a file is written first."""
    monkeypatch.chdir(tmp_path)

    def call(*words, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.txt").write_text(text)
        code = run(["import", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_several_files_make_one_cluster_that_loads(hetplan, tmp_path):
    code, out, err = hetplan(
        "cluster",
        "nodes.txt",
        "cards.txt",
        "ports.txt",
        "-o",
        "lab.yaml",
        nodes=SCONTROL,
        cards=QUERY + QUERY.split("\n", 1)[1] * 3,
        ports=SYSFS,
    )
    assert (code, out) == (0, "")
    assert "questions are left open" in err
    cluster, _ = load_cluster(tmp_path / "lab.yaml")
    assert (cluster.name, cluster.num_devices, len(cluster.networks)) == ("lab", 8, 2)


def test_a_file_of_one_group_is_named(hetplan):
    code, out, _ = hetplan("cluster", "big=a.txt", "small=b.txt", a=FULL_QUERY, b=LABELS)
    assert code == 0
    assert "  big:\n" in out
    assert "  small:\n" in out


def test_device_and_nodes_can_be_answered(hetplan, tmp_path):
    code, _, err = hetplan(
        "cluster",
        "t.txt",
        "p.txt",
        "--device",
        "A100-SXM4-80GB",
        "--nodes",
        "n[1-4]",
        "-o",
        "c.yaml",
        t=TOPO_NICS,
        p=SYSFS,
    )
    assert code == 0, err
    (group,) = load_cluster(tmp_path / "c.yaml")[0].groups
    assert (group.device.name, group.nodes) == ("A100-SXM4-80GB", ("n1", "n2", "n3", "n4"))
    code, _, err = hetplan("cluster", "q.txt", "--device", "L4", q=QUERY)
    assert (code, "already say which device" in err) == (2, True)


def test_what_keeps_a_file_from_use_is_said(hetplan, tmp_path):
    code, out, err = hetplan("cluster", "t.txt", t=PARTITIONS)
    assert code == 0
    assert "note: it cannot be planned with yet: the file:" in err
    (tmp_path / "open.yaml").write_text(out)
    assert run(["estimate", "open.yaml", "gpt2", "--global-batch", "8", "--seq-len", "128"]) == 2


def test_damage_is_an_error_at_its_line_and_nothing_is_written(hetplan, tmp_path):
    code, out, err = hetplan("cluster", "t.txt", "-o", "c.yaml", t=TOPO_FUSED)
    assert (code, out) == (2, "")
    assert err.startswith("error: t.txt:3:")
    assert not (tmp_path / "c.yaml").exists()


def test_a_format_can_be_named(hetplan):
    assert hetplan("nvidia-query", "q.txt", q=QUERY)[0] == 0
    code, _, err = hetplan("nvidia-topo", "q.txt", q=QUERY)
    assert (code, "found no header line that starts with GPU0" in err) == (2, True)
    code, _, err = hetplan("nvidia-tope", "q.txt", q=QUERY)
    assert (code, "did you mean 'nvidia-topo'" in err) == (2, True)
    assert "rocm-smi --showtopo" in hetplan("formats")[1]


def test_a_configuration_becomes_a_model_file(hetplan, tmp_path):
    code, _, _ = hetplan("model", "c.txt", "--name", "tiny", "-o", "tiny.yaml", c=json.dumps(TINYLLAMA))
    assert code == 0
    model, _ = load_model(tmp_path / "tiny.yaml")
    assert (model.name, model_params(model)) == ("tiny", 1_100_048_384)
    code, _, err = hetplan("model", "c.txt", c=json.dumps(TINYLLAMA).replace('"llama"', '"lama"'))
    assert (code, "c.txt:1:" in err, "'llama'" in err) == (2, True, True)
    assert hetplan("model", "tiny.yaml")[0] == 2


def test_a_log_becomes_a_calibration(hetplan, tmp_path):
    (tmp_path / "c.yaml").write_text(CLUSTER)
    code, _, err = hetplan("calibration", "l.txt", "--cluster", "c.yaml", "--nodes", "2", "-o", "cal.yaml", l=P4DE)
    assert (code, err) == (0, "")
    assert load_calibration(tmp_path / "cal.yaml")[0].networks["ib"].origin == "measured"
    code, out, _ = hetplan("calibration", "l.txt")
    assert (code, "# QUESTION: l.txt: on how many nodes" in out) == (0, True)
    code, _, err = hetplan("calibration", "l.txt", "--cluster", "c.yaml", "--network", "eth")
    assert (code, "unknown 'eth'" in err) == (2, True)


@pytest.mark.parametrize(("text", "more"), [(FLAGSCALE, []), (HEXISCALE, ["--groups", "a"])])
def test_settings_become_a_plan_that_is_priced_again(hetplan, tmp_path, text, more):
    (tmp_path / "c.yaml").write_text(CLUSTER)
    code, out, _ = hetplan("plan", "s.txt", s=text)
    assert (code, "hetplan: layout/v1" in out) == (0, True)
    words = ["plan", "s.txt", "--cluster", "c.yaml", "--model", "gpt2", "--seq-len", "1024", "-o", "p.yaml"]
    code, _, err = hetplan(*words, *more)
    assert code == 0, err
    plan = read_plan(tmp_path / "p.yaml")
    assert plan.estimate.step_s > 0
    assert run(["estimate", "p.yaml"]) == 0


def tool(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_this_machine_without_accelerators(hetplan, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = hetplan("here")
    assert code == 0
    assert "no accelerator was found here" in err
    assert "# QUESTION: which accelerator is it?" in out
    assert "    host: {" in out


def test_this_machine_with_accelerators(hetplan, tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    underlined = TOPO_NICS.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1", 1).replace("NUMA ID\n", "NUMA ID\x1b[0m\n")
    for name, text in (("topo", underlined), ("nvlink", NVLINK_STATUS), (f"--query-gpu={QUERY_KEYS}", QUERY)):
        (tools / name).write_text(text)
    tool(tools, "nvidia-smi", f'exec /bin/cat "{tools}/$1"')
    tool(tools, "rocm-smi", "echo no driver >&2; exit 1")
    monkeypatch.setenv("PATH", str(tools))
    code, _, err = hetplan("here", "-o", "here.yaml")
    assert code == 0
    assert "rocm-smi --showtopo failed: no driver" in err
    (group,) = load_cluster(tmp_path / "here.yaml")[0].groups
    assert (group.device.name, group.devices_per_node, len(group.nodes)) == ("A100-SXM4-80GB", 2, 1)
    assert group.device.link_bandwidth_bytes_per_s == 300e9


def test_files_kept_from_a_terminal_are_read_without_its_colours(hetplan):
    assert hetplan("cluster", "t.txt", t=TOPO_NICS.replace("GPU0", "\x1b[4mGPU0\x1b[0m", 1))[0] == 0


def test_two_vendors_in_one_kubernetes_cluster(hetplan):
    """https://github.com/skypilot-org/skypilot/issues/8311: 2 nodes of L40S, 1 of MI300X, and an AssertionError."""
    amd = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}
    nodes = [
        {
            "kind": "Node",
            "metadata": {"name": f"n{i}", "labels": labels},
            "status": {"capacity": {resource: count}, "allocatable": {resource: count}},
        }
        for i, (labels, resource, count) in enumerate(
            [({"nvidia.com/gpu.product": "NVIDIA-L40S"}, "nvidia.com/gpu", "4")] * 2 + [(amd, "amd.com/gpu", "8")]
        )
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes})
    code, out, err = hetplan("cluster", "nodes.txt", nodes=text)
    assert code == 0, err
    groups = yaml.safe_load(out)["groups"]
    assert {group["device"]: (group["nodes"], group["devices_per_node"]) for group in groups.values()} == {
        "L40S": ("n[0-1]", 4),
        "MI300X": ("n2", 8),
    }
