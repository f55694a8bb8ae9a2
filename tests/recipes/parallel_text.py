"""Two languages of which one is the other with its words in reverse order and other names for them."""

from whereformer.cli.main import main

NOUNS = ["cat", "dog", "bird", "fish", "child", "baker", "king", "queen", "farmer", "horse"]
PATTERNS = ["the {a} saw the {b} near the old house.", "a {b} and a {a} went to the market.", "where is the {a}?"]

TINY = [
    *("--vocab-size=320", "--hidden-size=16", "--num-heads=2", "--intermediate-size=32"),
    *("--encoder-layers=1", "--decoder-layers=1", "--batch-tokens=256", "--max-length=60"),
    *("--steps=6", "--every=2", "--warmup=2", "--average=2", "--learning-rate=0.01"),
]


def translated(line):
    return " ".join(f"Ü{word.strip('.?')}" for word in reversed(line.split())) + line[-1]


def pairs():
    source = [pattern.format(a=a, b=b) for a in NOUNS for b in NOUNS for pattern in PATTERNS]
    return source, [translated(line) for line in source]


def write(folder, source, target):
    """Aligned files, as options."""
    files = folder / "text.en", folder / "text.de"
    for file, lines in zip(files, (source, target), strict=True):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ["--data", *map(str, files)]


def train(data, out, *extra):
    main(["translate", "train", *data, "--out", str(out), *TINY, *extra])
