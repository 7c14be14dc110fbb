"""Graphs: what is recorded once and launched often, on both queues of several chips.

:mod:`~accelvisor.guest.graphs.builder` makes queues of a task graph and knows no device;
:mod:`~accelvisor.guest.graphs.graph` records programs over tensors;
:mod:`~accelvisor.guest.graphs.collectives` lowers what all chips do together to nodes of one graph.
"""
