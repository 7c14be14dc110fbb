"""accelvisor: a software PCIe AI accelerator for virtual machines."""

__version__ = "0.1.0"
