"""Figures of accelvisor, each measured beside its peer or limit in the same run."""
