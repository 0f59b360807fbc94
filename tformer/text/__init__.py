"""Text becomes tokens and tokens become text: byte-pair encoding, BERT's word pieces,
and the files of other tokenizers. Nothing here imports PyTorch.
"""
