"""The pretrain experiment: pretrain an encoder by masked language modelling or ELECTRA."""
