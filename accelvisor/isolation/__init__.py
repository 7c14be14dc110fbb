"""The resource unit: what cards have, who holds which part, and how that changes. Pure."""
