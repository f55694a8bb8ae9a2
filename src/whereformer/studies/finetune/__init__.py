"""The finetune study: fine-tune a pretrained model with and without a position method."""
