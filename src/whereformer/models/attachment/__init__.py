"""``attach`` and ``detach``: position methods for transformers' own models, added in place.

Text and audio models that dispatch attention through transformers can get a method, and so can the models of `patches`.

- `attach` does this and undoes it, and `load` loads a checkpoint of such a model.
- `find_calls` finds the calls of a model's attention, and `verify` compares its results with those under this library's
  attention. Both run a copy of the model on the small batches of `trial_run`, before anything changes.
- `configs` gives the model configurations that no other model shares.
- `builtin_positions` switches the model's own positions off.
- `patches` replace methods of layers that compute positions themselves, each by a `patched_forward`, which passes their
  position scores as terms.
- `hooks` pass the method and the layer's number to each call.
- `attention_function` is the attention that transformers calls.
"""

from .attach import attach, detach
from .load import load_attached

__all__ = ["attach", "detach", "load_attached"]
