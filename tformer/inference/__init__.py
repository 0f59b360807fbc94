"""From logits to texts: filters, samplers, generation, beam search, drafts, scores."""
