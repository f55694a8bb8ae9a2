"""Whether tests run every combination of cases, or only some whose parts together are all that there is."""

import os

EVERY = os.environ.get("WHEREFORMER_TEST_EVERY") == "1"
"""``make check-every`` sets the variable."""
