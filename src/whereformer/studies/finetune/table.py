"""The settings of a task of the user's own: a labeled table to train on, and one to judge by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ...lab.options import listed

if TYPE_CHECKING:
    from ...data.glue import OwnTask


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """A task of your own, in tables."""

    train: Path | None = None
    """Your own task: training rows, as .csv, .tsv, .jsonl or .parquet."""

    validation: Path | None = None
    """Your own task: validation rows."""

    text: str | None = None
    """Your own task: the column with the text, or two for a pair of texts, such as question,answer."""

    label: str | None = None
    """Your own task: the column of classes, or with ``regression`` the numbers."""

    regression: bool = False
    """Your own task: predict a number instead of a class."""

    def check_table(self) -> None:
        """Check that all of a task is there, or nothing.

        Raises:
            InputError: if a field is missing, or there without ``train``; it names the field.
        """
        own = {"validation": self.validation, "text": self.text, "label": self.label}
        if self.train is None:
            for name, value in {**own, "regression": self.regression or None}.items():
                if value is not None:
                    raise InputError(name, "only with `train`, for a task of your own")
            return
        for name, value in own.items():
            if value is None:
                raise InputError(name, "a task of your own (`train`) needs it")
        if len(self.columns) > 2:
            raise InputError("text", f"expected one column or two, got {self.text!r}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns with the text of a task of your own."""
        return listed("text", self.text or "", spaces=True)

    def own_task(self) -> OwnTask:
        """Return the task that the checked settings describe; there must be one."""
        from ...data.glue import OwnTask

        assert self.train is not None
        assert self.validation is not None
        return OwnTask(self.train, self.validation, self.columns, self.label or "", self.regression)
