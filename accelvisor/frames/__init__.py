"""Checkpoint frames: format, signing, sealing, verification, trust. Pure: no clock, file or socket
is reached but through an argument (docs/contracts.md, 7).
"""
