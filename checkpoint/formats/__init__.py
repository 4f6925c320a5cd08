"""Readers and writers of the checkpoint formats of others."""
