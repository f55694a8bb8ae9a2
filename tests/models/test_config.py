"""Configurations refuse unknown fields, while files of other libraries may have more."""

import json

import pytest
import transformers

from whereformer import Encoder, EncoderConfig, Seq2SeqConfig
from whereformer.errors import InputError
from whereformer.models import ElectraPretrainingConfig

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "blocks": "2"}


@pytest.mark.parametrize("config_class", [EncoderConfig, ElectraPretrainingConfig, Seq2SeqConfig])
@pytest.mark.parametrize(("field", "suggestion"), [("hiden_size", "hidden_size"), ("postion", "position")])
def test_misspelt_fields_are_refused_with_the_right_name(config_class, field, suggestion):
    message = rf"^{field}: not a field of {config_class.__name__}; did you mean '{suggestion}'\?$"
    with pytest.raises(ValueError, match=message):
        config_class(**{field: 4})


def test_other_errors_of_fields():
    for changes, message in [
        ({"zzz": 1}, r"zzz: not a field of EncoderConfig$"),
        ({"max_length": 512}, r"max_length: not a field of EncoderConfig"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers: use blocks='3' instead"),
        ({"position": "tisa", "num_kernels": 3}, r"num_kernels: not a field of EncoderConfig"),
        ({"attention_backend": "bogus"}, r"attention_backend: expected one of auto, .*, got 'bogus'$"),
        ({"num_labels": -1}, r"num_labels: expected at least 0, got -1$"),
        ({"num_labels": 10**9}, r"num_labels: expected at most 65536, got 1000000000$"),
        ({"num_labels": "3"}, r"num_labels: expected an integer, got '3'$"),
        ({"pad_token_id": -5}, r"pad_token_id: expected at least 0, got -5$"),
        ({"blocks": "4 - 4"}, r"blocks: expected layers as .*, got '4 - 4'$"),
        ({"position": "tsia"}, r"position: unknown position method 'tsia'; did you mean 'tisa'"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            EncoderConfig(**changes)
    with pytest.raises(ValueError, match=r"^num_heads: not a field of EncoderConfig"):
        EncoderConfig.preset("modernbert", num_heads=4)


@pytest.mark.parametrize(
    ("position", "options", "message"),
    [
        ("tisa", {"num_kernel": 3}, "position 'tisa' has no option 'num_kernel'; it has num_kernels, share_layers$"),
        ("tisa", {"num_kernels": "3"}, "num_kernels: expected an integer, got '3'$"),
        ("tisa/none", {"tisa": {"clip": 3}}, "position 'tisa' has no option 'clip'; it has "),
        ("tisa/nope", {"none": {"clip": 3}}, "position 'none' has no option 'clip'; it has no options$"),
        ("tisa", {"num_layers": 3}, "position 'tisa' has no option 'num_layers'; it has "),
        ("rope/none", {"rope": 3}, "rope: expected a dictionary with options of only this method, got 3$"),
    ],
)
def test_options_of_positions_are_checked_at_once(position, options, message):
    for config_class in (EncoderConfig, ElectraPretrainingConfig, Seq2SeqConfig):
        with pytest.raises(InputError, match=f"^position_options: {message}"):
            config_class(position=position, position_options=options)


def test_what_transformers_takes_is_taken():
    config = EncoderConfig(
        **SIZES,
        num_labels=3,
        output_attentions=True,
        torch_dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
        problem_type="regression",
        label2id={"a": 0, "b": 1, "c": 2},
    )
    assert config.num_labels == 3
    assert config.output_attentions


def test_files_of_other_hands_are_read(tmp_path):
    model = Encoder(EncoderConfig(**SIZES))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    entries |= {"num_heads": 7, "some_tool": {"version": 1}, "architectures": ["Encoder"], "auto_map": {}}
    path.write_text(json.dumps(entries), encoding="utf-8")
    for config in (
        EncoderConfig.from_pretrained(tmp_path),
        EncoderConfig.from_dict(entries),
        transformers.AutoConfig.from_pretrained(tmp_path),
        Encoder.from_pretrained(tmp_path).config,
    ):
        assert config.num_attention_heads == 2
        assert EncoderConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
        assert not hasattr(config, "some_tool")
