"""Moving a function to another host: state machines and protocol, sans-IO, and the link beside them
(docs/contracts.md, 9).
"""
