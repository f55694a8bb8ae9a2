"""``attach`` and ``detach``: position methods for transformers' own models, added in place.

`attach` does this and undoes it, and `load` loads a checkpoint of such a model. Before anything changes, `verify`
compares the results of a model on the small batches of `trial_run` with its results under this library's attention,
and `find_calls` finds the calls of its attention. `hooks` then pass the method and the layer's number to each call, and
`attention_function` is the attention that transformers calls. `builtin_positions` switches the model's own positions
off, and `configs` gives the model configurations that no other model shares. `patches` replace methods of layers that
compute positions themselves, each by a `patched_forward`, which passes their position scores as terms. Text and audio
models that dispatch attention through transformers can get a method, and so can the models of `patches`.
"""

from .attach import attach, detach
from .load import load_attached

__all__ = ["attach", "detach", "load_attached"]
