"""The commands a user of another planner comes over with, end to end, and the same bytes when repeated."""

import json

import peer_paths  # noqa: F401 - makes the benches importable
import peers_sailor
import pytest
from peers_run import hetplan


def test_a_profile_becomes_a_calibration_a_model_and_the_same_plan_twice(tmp_path):
    calibration, model = peers_sailor.import_profile("OPT-350", tmp_path)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(peers_sailor.cluster_text("small", (("A100-40", peers_sailor.ZONE, 8),)), encoding="utf-8")
    texts = []
    for name in ("first.yaml", "second.yaml"):
        words = ("search", cluster, model, "--calibration", calibration, "--global-batch", 64, "--seq-len", 2048)
        narrow = ("--precision", "fp32", "--uniform-microbatches", "--recompute", "none", "--no-compare")
        hetplan(*words, *narrow, "-o", tmp_path / name)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    neutral = peers_sailor.to_neutral(tmp_path / "first.yaml")
    assert peers_sailor.evaluate(neutral).warnings == ()


def test_a_microbatch_no_table_covers_is_refused(tmp_path):
    calibration, model = peers_sailor.import_profile("OPT-350", tmp_path)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(peers_sailor.cluster_text("small", (("A100-40", peers_sailor.ZONE, 8),)), encoding="utf-8")
    words = ("estimate", cluster, model, "--calibration", calibration, "--global-batch", 64, "--seq-len", 2048)
    with pytest.raises(RuntimeError, match="were not measured on A100-40 with tp 1, 16 samples"):
        hetplan(*words, "--precision", "fp32", "--micro-batch", 16)


def test_traffic_alone_is_placed_and_written(tmp_path):
    (tmp_path / "pairs.csv").write_text(
        "from,to,latency,bandwidth\nwest,east,60 ms,1 Gbit/s\nwest,west,5 ms,2 Gbit/s\neast,east,5 ms,2 Gbit/s\n",
        encoding="utf-8",
    )
    (tmp_path / "cluster.yaml").write_text(
        "hetplan: cluster/v1\nname: sites\ngroups:\n"
        "  west: {device: A100-SXM4-80GB, nodes: 4, devices_per_node: 1, site: west}\n"
        "  east: {device: A100-SXM4-80GB, nodes: 4, devices_per_node: 1, site: east}\n"
        "networks:\n"
        "  wan: {joins: [west, east], kind: ethernet, bandwidth: 1 Gbit/s, latency: 1 s, pairs: pairs.csv}\n",
        encoding="utf-8",
    )
    (tmp_path / "model.yaml").write_text(
        "hetplan: model/v1\nname: job\nvolumes: {stages: 4, replicas: 2, gradient: 1 GB, activation: 100 MB}\n",
        encoding="utf-8",
    )
    words = ("search", tmp_path / "cluster.yaml", tmp_path / "model.yaml", "-o", tmp_path / "placement.yaml")
    answer = json.loads(hetplan(*words, "--json").stdout)
    assert answer["status"] == "optimal"
    exchange = 2 * (0.005 + 0.5e9 / 0.25e9)
    path = 2 * (0.005 + 0.1e9 / 0.25e9) + (0.06 + 0.1e9 / 0.125e9)
    assert answer["value"] == pytest.approx(exchange + 2 * path)
    assert answer["classes"] == [["west-1", "west-2", "west-3", "west-4"], ["east-1", "east-2", "east-3", "east-4"]]
    assert (tmp_path / "placement.yaml").read_text(encoding="utf-8").startswith("hetplan: placement/v1\n")
