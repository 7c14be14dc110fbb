"""Numeric kernels: every instruction declared once, with a plain reference twin and a fast twin.

``registry`` holds the declarations, ``programs`` validates and plans what a guest uploads,
``interpreter`` runs a program without a device, ``document`` writes docs/instructions.md.

An instruction is added in a topic file (``elementwise``, ``reduce``, ``linear``, ``conv``,
``pool``, ``nn``, ``move``); the generic tests pick it up. This room knows nothing of VMs.
"""
