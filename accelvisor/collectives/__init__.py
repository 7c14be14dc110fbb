"""Collectives: rings that move only what is not zero, and add it while it is packed.

A neutral room: guests, functions and programs of hosts all import it, so it needs numpy alone, and
of accelvisor only errors, limits and the shared layout. numba, where it is there and was asked for
(:func:`accelvisor.collectives.fast.warm`), makes packing faster and changes no bit.

``zvc`` packs, ``algorithms`` says who sends what to whom (sans-IO), ``local`` and ``mpi`` carry it.
"""
