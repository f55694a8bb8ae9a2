"""Fine-tune a pretrained model with and without a position method."""
