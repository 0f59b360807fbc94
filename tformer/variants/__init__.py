"""Attention variants: each is another part, and the models stay as they are."""
from tformer.variants.gqa import convert_to_gqa as convert_to_gqa
