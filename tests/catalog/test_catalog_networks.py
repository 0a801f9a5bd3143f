import re

import pytest

from hetplan.catalog import find_link, link_names
from hetplan.errors import SpecError


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [
        ("PCIe3-x16", 15.75),
        ("PCIe4-x16", 31),
        ("PCIe5-x16", 63),
        ("PCIe6-x16", 121),
        ("NVLink1", 80),
        ("NVLink2", 150),
        ("NVLink3", 300),
        ("NVLink4", 450),
        ("NVLink5", 900),
        ("xGMI-MI300X", 448),
        ("InfiniBand-EDR", 12.5),
        ("InfiniBand-HDR", 25),
        ("InfiniBand-NDR", 50),
        ("InfiniBand-XDR", 100),
        ("RoCE-25G", 3.125),
        ("RoCE-400G", 50),
        ("Ethernet-1G", 0.125),
        ("Ethernet-400G", 50),
        ("EFA-v1", 12.5),
        ("Slingshot-11", 25),
        ("WAN-Virginia-Ohio", 0.14),
    ],
)
def test_bandwidth_is_nominal_and_of_one_direction(name, gigabytes_per_s):
    assert find_link(name).bandwidth_bytes_per_s == pytest.approx(gigabytes_per_s * 1e9)


@pytest.mark.parametrize("name", link_names())
def test_both_numbers_of_a_link_have_a_source(name):
    link = find_link(name)
    assert 1e-7 < link.latency_s < 1
    for source in (link.bandwidth_source, link.latency_source):
        assert len(source) > 10
        assert not re.fullmatch(r"[a-z-]+", source), f"{source} is a key nobody explains"


def test_lines_between_sites_are_slower_than_any_fabric():
    slowest_fabric = min(find_link(name).latency_s for name in link_names() if name.startswith("WAN-"))
    assert all(find_link(name).latency_s < slowest_fabric for name in link_names() if not name.startswith("WAN-"))


def test_link_is_found_in_any_case_and_refused_with_the_nearest_name():
    assert find_link("infiniband-hdr").name == "InfiniBand-HDR"
    with pytest.raises(SpecError, match=r"unknown link 'InfiniBand-HRD'; did you mean 'InfiniBand-HDR'\?"):
        find_link("InfiniBand-HRD")
