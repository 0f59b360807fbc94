"""Whole models, from ids to logits, and their files."""
