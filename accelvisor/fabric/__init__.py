"""Cards as grids of chips, and the links between them that are switched on and off.

A pure room: no socket, clock or file; the time is an argument, in cycles of the model clock.

``grid`` numbers chips and links, ``links`` is what one link does, ``fabric`` says who may switch
what, ``former`` makes rings of chips, ``timing`` and ``traffic`` say what goes over them and when.
The mechanism, links between chips and cards that a host activates and deactivates, is that of
US 11,615,295; states, credits and the former are our own (docs/fabric.md).
"""
