"""``attach`` and ``detach``: position methods for transformers' own models, added in place.

`proof` compares a model with itself, on small batches of `trial`; `found` finds the calls of its attention; `hooks`
hands each of them the method and its layer; `interface` is the attention that transformers then calls; `own` switches
the model's own positions off; `configs` gives it configurations that no other model shares; `served` lets functions of
`kinds` say in terms what layers compute themselves; `attaching` does and undoes all of this, and `saved` loads a
checkpoint of such a model. Any model of text or sound that dispatches its attention through transformers can get a
method, and those of `kinds`.
"""

from .attaching import attach, detach
from .saved import load_attached

__all__ = ["attach", "detach", "load_attached"]
