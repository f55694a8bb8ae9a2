"""Programs that nobody here wrote run our models and attached ones; each test skips where its program is missing."""

import copy
import json
import os
import pickle
from functools import partial
from typing import get_type_hints

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from whereformer import Encoder, EncoderConfig, attach, detach, load_attached, unpad
from whereformer.errors import InputError
from whereformer.lab.sentence_encoders import keep_sentence_settings
from whereformer.models import (
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    Seq2SeqConfig,
    Seq2SeqForConditionalGeneration,
    heads,
)

from .peers import SIZES, batch, make, states

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "saw", "the"]
TEXTS = ["the cat saw the dog", "dog"]
OURS = {"vocab_size": len(WORDS), "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "blocks": "2"}


def save(model, folder):
    """Save a model with a tokenizer of words."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=16, **names)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize("name", ["albert", "bert"])
def test_forward_without_the_hooks_of_a_call(name, copied):
    model = copied(attach(make(name), "tisa"))
    torch.testing.assert_close(states(model, run=model.forward), states(model), rtol=0, atol=0)
    torch.testing.assert_close(states(detach(model)), states(make(name)), rtol=0, atol=0)


@pytest.mark.parametrize("position", ["tisa", "none"])
def test_sentence_transformers_runs_an_attached_model(position, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    sizes = SIZES | {"vocab_size": len(WORDS)}
    folder = save(transformers.AlbertModel(transformers.AlbertConfig(**sizes, embedding_size=8)), tmp_path)
    client = library.SentenceTransformer(folder, device="cpu")
    before = client.encode(TEXTS)
    attach(client[0].auto_model, position)
    assert (abs(client.encode(TEXTS) - before).max() < 1e-5) == (position == "none")


def test_sentence_transformers_ranks_and_expands_with_our_heads(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    classifier = EncoderForSequenceClassification(EncoderConfig(**OURS, position="tisa", num_labels=1)).eval()
    ranker = library.CrossEncoder(save(classifier, tmp_path / "ranker"), device="cpu")
    tokens = ranker.tokenizer(TEXTS[:1], TEXTS[1:], return_tensors="pt")
    score = classifier(**tokens).logits.sigmoid().detach().numpy()[0]
    assert ranker.predict([TEXTS]) == pytest.approx(score, abs=1e-6)

    model = EncoderForMaskedLM(EncoderConfig(**OURS, position="tisa")).eval()
    expander = library.SparseEncoder(save(model, tmp_path / "expander"), device="cpu")
    embeddings = expander.encode(TEXTS, convert_to_sparse_tensor=False)
    assert embeddings.shape == (2, len(WORDS))


def test_pooling_and_length_of_a_sentence_transformer_are_kept(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    plain = save(Encoder(EncoderConfig(**OURS, position="tisa")), tmp_path / "plain")
    body = Transformer(plain, max_seq_length=5)
    steps = [body, Pooling(OURS["hidden_size"], pooling_mode="max"), Normalize()]
    client = library.SentenceTransformer(modules=steps, device="cpu")
    client.save_pretrained(str(tmp_path / "whole"))
    # Where most folders on the Hub have it; the program itself now writes it with the tokenizer.
    settings = tmp_path / "whole" / "sentence_bert_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_seq_length": 5}))
    keep_sentence_settings(tmp_path / "whole", tmp_path / "plain")
    loaded = library.SentenceTransformer(plain, device="cpu")
    assert loaded.max_seq_length == 5
    assert abs(loaded.encode(TEXTS) - client.encode(TEXTS)).max() < 1e-6

    os.mkfifo(tmp_path / "whole" / "1_Pooling" / "pipe.json")
    with pytest.raises(InputError, match="model: expected a file, got a pipe, socket or device"):
        keep_sentence_settings(tmp_path / "whole", tmp_path / "plain")


def test_every_forward_says_what_it_returns():
    kinds = [kind for kind in vars(heads).values() if isinstance(kind, type) and kind.__name__.startswith("EncoderFor")]
    assert len(kinds) == 5
    for kind in kinds:
        assert get_type_hints(kind.forward)["return"] is heads.HeadOutput


@pytest.mark.parametrize("kind", ["encoder", "translator", "attached"])
def test_several_devices_are_refused(kind, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    if kind == "translator":
        sizes = {name: size for name, size in OURS.items() if name != "blocks"}
        model = Seq2SeqForConditionalGeneration(Seq2SeqConfig(**sizes, encoder_layers=1, decoder_layers=1))
    else:
        model = EncoderForMaskedLM(EncoderConfig(**OURS)) if kind == "encoder" else make("bert")
    model.save_pretrained(tmp_path)
    device_map = {name: "disk" if number else "cpu" for number, (name, _) in enumerate(model.named_children())}

    def load():
        return type(model).from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "disk")

    refused = partial(attach, load(), "tisa") if kind == "attached" else load
    with pytest.raises(InputError, match=r"device_map: expected one device for the whole model, got cpu, disk$"):
        refused()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["ours", "bert", "t5"])
def test_returned_weights_have_gradients(name, training):
    """As methods that multiply attention with its gradient need."""
    if name == "ours":
        model = Encoder(EncoderConfig(**OURS, position="tisa"))
        inputs = {"input_ids": torch.randint(4, len(WORDS), (2, 7))}
    else:
        model = attach(make(name), "none" if name == "t5" else "tisa")
        inputs = batch(model)
    model.train(training)
    outputs = model(**inputs, output_attentions=True)
    weights = next(outputs[kind] for kind in ("attentions", "encoder_attentions") if kind in outputs)
    for weight in weights:
        weight.retain_grad()
    outputs.last_hidden_state.square().sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in weights)


def test_sentence_transformers_without_padding(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    texts, config = [*TEXTS, "the cat saw", "cat cat cat the dog saw"], EncoderConfig(**OURS, position="learned+tisa")
    funnel = Encoder(EncoderConfig(**OURS | {"blocks": "1-1"}, position="tisa", decoder_layers="1"))
    bert = transformers.BertModel(transformers.BertConfig(**SIZES | {"vocab_size": len(WORDS)}))
    for name, model, kind in (
        ("words", Encoder(config), library.MultiVectorEncoder),
        ("expander", EncoderForMaskedLM(config), library.SparseEncoder),
        ("funnel", funnel, library.SentenceTransformer),
        ("attached", bert, library.SentenceTransformer),
    ):
        client = kind(save(model, tmp_path / name), device="cpu")
        if model is bert:
            with pytest.raises(InputError, match=r"^model: BertModel mixes packed texts"):
                unpad(client)
            assert not client[0].can_flatten_inputs
            attach(client[0].auto_model, "fire")
        padded = client.encode(texts, batch_size=1 if name == "funnel" else 4)
        assert "cu_seq_lens_q" in unpad(client).preprocess(texts)
        for embedding, expected in zip(client.encode(texts), padded, strict=True):
            torch.testing.assert_close(embedding, expected, rtol=1e-4, atol=1e-5)
    client.save_pretrained(str(tmp_path / "saved"))
    loaded = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert loaded[0].unpad_inputs
    loaded[0].model = load_attached(tmp_path / "saved", transformers.BertModel).eval()
    assert abs(unpad(loaded).encode(texts) - padded).max() < 1e-5
    assert "cu_seq_lens_q" in loaded.preprocess(texts)

    short = Encoder(EncoderConfig(**OURS | {"blocks": "1-1"}, position="tisa"))
    with pytest.raises(InputError, match=r"^model: Encoder pools tokens and has no decoder"):
        unpad(library.SentenceTransformer(save(short, tmp_path / "short"), device="cpu"))
    with pytest.raises(InputError, match=r"^model: expected a model of sentence-transformers"):
        unpad(bert)
    # In half precision, what other texts change may be as small as rounding.
    mixes = library.SentenceTransformer(save(transformers.BertModel(bert.config), tmp_path / "mixes"), device="cpu")
    with pytest.raises(InputError, match=r"mixes packed texts"):
        unpad(mixes.bfloat16())


# peft's own warnings.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [None, ["whereformer"]])
def test_peft_trains_saves_and_merges_a_method_that_is_named(saved, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = {"target_modules": ["query", "value"], "r": 2, "modules_to_save": saved}
    model = peft.get_peft_model(attach(make("bert"), "tisa"), peft.LoraConfig(**lora))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        model.train()(**batch(model)).last_hidden_state.square().sum().backward()
        optimizer.step()
    changed = [name for name, parameter in model.named_parameters() if not parameter.equal(before[name])]
    assert any(".whereformer." in name for name in changed) == (saved is not None)
    assert any("lora" in name for name in changed)
    model.save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(attach(make("bert"), "tisa"), tmp_path).merge_and_unload()
    expected = states(model.eval(), batch(model))
    torch.testing.assert_close(states(merged.eval()), expected, rtol=1e-4, atol=1e-5)
    fresh = attach(make("bert"), "tisa").whereformer.state_dict()
    moved = [name for name, tensor in merged.whereformer.state_dict().items() if not tensor.equal(fresh[name])]
    assert bool(moved) == (saved is not None)
