"""Devices, links and models that ship with hetplan, and the loading of spec files that refer to them."""

from hetplan.catalog.devices import device_names, find_device
from hetplan.catalog.load import Source, load_calibration, load_cluster, load_model, load_workload_file
from hetplan.catalog.models import find_model, find_model_config, model_names
from hetplan.catalog.networks import LinkGeneration, find_link, link_names

__all__ = [
    "LinkGeneration",
    "Source",
    "device_names",
    "find_device",
    "find_link",
    "find_model",
    "find_model_config",
    "link_names",
    "load_calibration",
    "load_cluster",
    "load_model",
    "load_workload_file",
    "model_names",
]
