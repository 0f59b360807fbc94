"""Text to tokens and back; nothing here imports torch."""
