"""The extend study: a pretrained text encoder is trained for minutes to read longer texts."""
