"""Ids of texts; nothing is offered to other kernels."""
