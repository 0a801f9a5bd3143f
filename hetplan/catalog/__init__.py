"""Devices, links and models that ship with hetplan, and the loading of spec files that refer to them."""

from hetplan.catalog.devices import device_names, find_device
from hetplan.catalog.networks import LinkGeneration, find_link, link_names

__all__ = ["LinkGeneration", "device_names", "find_device", "find_link", "link_names"]
