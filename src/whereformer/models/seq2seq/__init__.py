"""The translation Transformer (Vaswani et al. 2017): configuration, encoder and decoder, model and loss."""
