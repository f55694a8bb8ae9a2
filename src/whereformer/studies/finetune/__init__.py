"""The finetune experiment: fine-tune a pretrained model with and without a position method."""
