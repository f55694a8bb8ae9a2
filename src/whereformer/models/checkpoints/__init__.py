"""Pretrained checkpoints: loads BERT, ALBERT, RoBERTa, ELECTRA and Funnel-Transformer into this library's models."""
