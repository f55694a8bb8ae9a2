"""Pretrain an encoder by masked language modelling or ELECTRA."""
