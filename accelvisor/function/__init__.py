"""The per-function process: holder, zygote and worker (docs/contracts.md sections 1 and 2)."""
