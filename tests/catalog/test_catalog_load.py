import hashlib

import pytest

from hetplan.catalog import device_names, load_calibration, load_cluster, load_model, load_workload_file
from hetplan.catalog.load import calibration_names
from hetplan.catalog.strays import stray_names
from hetplan.errors import SpecError, UsageError
from hetplan.specs.content import content_sha256
from hetplan.specs.model import model_params
from hetplan.specs.nodes import nodes_from_text

CLUSTER = """hetplan: cluster/v1
name: c
groups:
  a: {device: A100-SXM4-80GB, nodes: 1, devices_per_node: 8, site: east}
  b: {device: V100-SXM2-32GB, nodes: 1, devices_per_node: 8, site: west}
networks:
  eth: {joins: [a, b], kind: ethernet, bandwidth: 10 Gbit/s, latency: 30 us%s}
"""
PAIRS = "from,to,latency,bandwidth\neast,west,12 ms,1 Gbit/s\n"
MODEL = "hetplan: model/v1\nname: m\nconfig: %s\n"
CONFIG = """{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "tie_word_embeddings": false}"""


def write(path, text):
    path.write_text(text, newline="")
    return path


SAID = """["m","hetplan","workload/v1","seq_len",["s","8"],"precision","fp16","x",["l",["s","true"],"8",["m"]]]"""


def test_a_hash_is_of_what_a_file_says():
    text = "# a comment\nhetplan: workload/v1\nseq_len:   8 # eight\n\nprecision: 'fp16'\nx: [true, \"8\", {}]\n"
    block = "hetplan: workload/v1\nseq_len: 8\nprecision: fp16\nx:\n  - true\n  - '8'\n  - {}\n"
    expected = hashlib.sha256(SAID.encode()).hexdigest()
    assert {content_sha256(nodes_from_text(one, "x.yaml")) for one in (text, block)} == {expected}


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("\n", "\r\n", True),
        ("name: c\n", "# a remark\nname:   'c'   # another\n\n", True),
        ("{device: V100-SXM2-32GB, nodes: 1,", "{device: V100-SXM2-32GB,\n    nodes: 1, ", True),
        ("devices_per_node: 8", "devices_per_node: 4", False),
        ("30 us", "31 us", False),
        ("name: c", "name: d", False),
    ],
)
def test_only_what_a_cluster_file_says_changes_its_hash(tmp_path, old, new, is_same):
    plain = write(tmp_path / "plain.yaml", CLUSTER % "")
    changed = write(tmp_path / "changed.yaml", (CLUSTER % "").replace(old, new))
    assert changed.read_bytes() != plain.read_bytes()
    assert (load_cluster(plain)[1].sha256 == load_cluster(changed)[1].sha256) == is_same


def test_hash_of_a_cluster_changes_with_its_table_of_pairs(tmp_path):
    path = write(tmp_path / "c.yaml", CLUSTER % ", pairs: p.csv")
    table = write(tmp_path / "p.csv", PAIRS)
    cluster, before = load_cluster(path)
    assert cluster.networks[0].pairs["west", "east"].latency_s == pytest.approx(0.012)
    digests = [content_sha256(nodes_from_text(path.read_text(), "c")), hashlib.sha256(table.read_bytes()).hexdigest()]
    assert before.sha256 == hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
    write(table, PAIRS.replace("12 ms", "13 ms"))
    assert load_cluster(path)[1].sha256 != before.sha256


def test_a_mention_of_pairs_in_a_comment_names_no_table(tmp_path):
    plain = write(tmp_path / "plain.yaml", CLUSTER % "")
    path = write(tmp_path / "c.yaml", (CLUSTER % "") + "# pairs: none\n")
    assert load_cluster(path)[1].sha256 == load_cluster(plain)[1].sha256


def test_unknown_device_in_a_cluster_is_located(tmp_path):
    path = write(tmp_path / "c.yaml", (CLUSTER % "").replace("A100-SXM4-80GB", "A100-SMX4-80GB"))
    with pytest.raises(SpecError) as error:
        load_cluster(path)
    where = f"{path}:4:15: groups.a.device: "
    assert str(error.value) == where + "unknown device 'A100-SMX4-80GB'; did you mean 'A100-SXM4-80GB'?"


@pytest.mark.parametrize("load", [load_cluster, load_calibration, load_workload_file])
def test_missing_file_is_refused_by_name(tmp_path, load):
    path = tmp_path / "none.yaml"
    with pytest.raises(SpecError, match=r"none\.yaml:1:1: cannot read the file: no such file"):
        load(path)


@pytest.mark.parametrize("load", [load_cluster, load_model, load_calibration, load_workload_file])
def test_bytes_that_are_no_text_are_refused(tmp_path, load):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"hetplan: x\nname: \xff\n")
    with pytest.raises(SpecError, match=r"x\.yaml:2:7: byte 0xff is not UTF-8 text"):
        load(path)


def test_catalog_model_is_loaded_by_name_in_any_case():
    model, source = load_model("Llama-3.1-8B")
    assert source.name == "llama-3.1-8b"
    assert len(source.sha256) == 64
    assert model_params(model) == 8_030_261_248


def test_misspelt_model_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match=r"unknown model 'lama-3\.1-8b'; did you mean 'llama-3\.1-8b'\?.*no file"):
        load_model("lama-3.1-8b")


def test_what_ends_like_a_file_is_a_file():
    with pytest.raises(SpecError, match="cannot read the file"):
        load_model("llama-3.1-8b.json")


def test_bare_config_is_a_model(tmp_path):
    path = write(tmp_path / "config.json", CONFIG)
    model, source = load_model(path)
    assert len(model.chain) == 4
    assert source.sha256 == content_sha256(nodes_from_text(CONFIG, "c"))


def test_hash_of_a_model_file_changes_with_the_configuration_it_names(tmp_path):
    path = write(tmp_path / "m.yaml", MODEL % "small.json")
    config = write(tmp_path / "small.json", CONFIG)
    before = load_model(path)[1].sha256
    write(config, CONFIG.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    model, after = load_model(path)
    assert len(model.chain) == 5
    assert after.sha256 != before


def test_hash_of_a_model_file_covers_the_catalog_entry_it_names(tmp_path):
    path = write(tmp_path / "m.yaml", MODEL % "llama-3.1-8b")
    digests = [content_sha256(nodes_from_text(path.read_text(), "m")), load_model("llama-3.1-8b")[1].sha256]
    expected = hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
    assert load_model(path)[1].sha256 == expected


def test_workload_file_gives_what_it_says_and_no_more(tmp_path):
    path = write(tmp_path / "w.yaml", "hetplan: workload/v1\nseq_len: 4096\nprecision: auto\n")
    assert load_workload_file(path) == {"seq_len": 4096, "precision": "auto"}


def test_calibration_file_is_loaded_with_its_hash(tmp_path):
    text = "hetplan: calibration/v1\ndevices:\n  T4: {gemm_peak_fraction: 0.5, origin: measured}\n"
    path = write(tmp_path / "k.yaml", text)
    calibration, source = load_calibration(path)
    assert calibration.device("T4").gemm_peak_fraction == 0.5
    assert source.sha256 == content_sha256(nodes_from_text(text, "k"))


def test_names_in_a_calibration_that_nothing_answers_to_are_said_with_their_place(tmp_path):
    constants = "hetplan: calibration/v1\ndevices:\n  A100-SMX4-80GB: {gemm_peak_fraction: 0.5}\n"
    constants += "  H100-SXM5-80GB: {gemm_peak_fraction: 0.5}\nnetworks:\n"
    constants += '  "*": {bandwidth_fraction: 0.5}\n  etj: {bandwidth_fraction: 0.5}\n'
    file = write(tmp_path / "constants.yaml", constants)
    cluster = load_cluster(write(tmp_path / "c.yaml", CLUSTER % ""))[0]
    device, network = stray_names(file, cluster)
    assert device.startswith(f"{file}:3:") and "devices.A100-SMX4-80GB" in device and "A100-SXM4-80GB'?" in device
    assert network.startswith(f"{file}:7:") and "networks.etj" in network and "did you mean 'eth'?" in network


def test_calibrations_that_ship_name_known_devices_their_source_and_their_error():
    names = calibration_names()
    assert len(names) >= 20
    for name in names:
        made, _ = load_calibration(name)
        assert set(made.devices) <= set(device_names()), name
        assert made.relative_error is not None and 0 < made.relative_error < 0.5, name
        assert {"fitted on", "source", "error on runs left out"} <= set(made.provenance), name
