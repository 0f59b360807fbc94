"""Other attention layers that the same models take: shared, latent, windowed, sparse.
"""

from tformer.variants.gqa import convert_to_gqa as convert_to_gqa
