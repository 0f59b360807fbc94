"""From logits to texts: filters, samplers, generation, beams, drafts."""
