"""Several documents in one row without padding, with the same results as in separate rows.

Positions start again with each document, and document ids keep the documents apart. On a CPU, attention computes one
document at a time, so a packed row costs as much as its documents.
"""

import torch

from whereformer import Encoder, EncoderConfig

LENGTHS = 7, 12, 5

if __name__ == "__main__":
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=100, hidden_size=32, num_attention_heads=2, blocks="2", position="learned+shaw")
    model = Encoder(config).eval()
    documents = [torch.randint(100, (1, length)) for length in LENGTHS]

    packed = torch.cat(documents, 1)
    document_ids = torch.cat([torch.full((1, length), number) for number, length in enumerate(LENGTHS)], 1)
    position_ids = torch.cat([torch.arange(length).unsqueeze(0) for length in LENGTHS], 1)
    print("documents:", document_ids[0].tolist())
    print("positions:", position_ids[0].tolist())

    with torch.no_grad():
        together = model(packed, document_ids=document_ids, position_ids=position_ids).last_hidden_state
        alone = [model(document).last_hidden_state for document in documents]
    apart = together.split(LENGTHS, 1)
    for number, (one, other) in enumerate(zip(apart, alone, strict=True)):
        print(f"document {number}: differs from its own row by at most {(one - other).abs().max().item():.1e}")

    padded = len(LENGTHS) * max(LENGTHS)
    print(f"{sum(LENGTHS)} tokens in the packed row; a padded batch of the same documents has {padded}")
