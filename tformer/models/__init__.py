"""Whole models, from token ids to logits, and how they are saved and loaded."""
