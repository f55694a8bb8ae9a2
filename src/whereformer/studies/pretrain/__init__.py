"""The pretrain study: pretrain an encoder by masked language modeling or ELECTRA."""
