"""The pretrain study: pretrain an encoder by masked language modelling or ELECTRA."""
