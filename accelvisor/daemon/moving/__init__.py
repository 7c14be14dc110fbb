"""What accelvisord does to save, load and move functions: it borrows their memory, copies it while
they compute, and drives the state machines of :mod:`accelvisor.migration` (docs/migration.md).
"""
