"""The meaning of a store: units, roles, tensors, and the tools over committed generations."""
