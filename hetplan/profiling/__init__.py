"""Measuring devices, whole layers and links with torch, and turning the figures into a calibration."""
