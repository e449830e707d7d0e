"""Devices by name; the module is :mod:`flashtile.hardware.machine`."""

from flashtile.hardware.machine import describe_device, find_device, versions

__all__ = ["describe_device", "find_device", "versions"]
