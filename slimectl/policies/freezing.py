"""Selects the trainable parameters by regular expressions over their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slimectl.errors import SettingsError


def trained(names: Iterable[str], *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> set[str]:
    """Return the names that match no pattern of `freeze` and, if `train_only` is set, one of its patterns.

    A pattern matches anywhere in a name. Raises SettingsError for a pattern that matches no name, or if
    no parameter remains.

    >>> sorted(trained(["a.norm", "a.mlp", "b.mlp"], freeze=["norm"], train_only=[r"^a\\."]))
    ['a.mlp']
    """
    names = list(names)
    for pattern in (*freeze, *train_only):
        try:
            matches = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise SettingsError(f"{pattern!r} is not a regular expression ({error})") from error
        if not matches:
            raise SettingsError(
                f"{pattern!r} matches no parameter; names look like {names[len(names) // 2]} (regular expressions of"
                " train.freeze_params_name_list and train.only_train_params_name_list)"
            )
    trainable = {
        name
        for name in names
        if not any(re.search(pattern, name) for pattern in freeze)
        and (not train_only or any(re.search(pattern, name) for pattern in train_only))
    }
    if not trainable:
        raise SettingsError(
            "train.freeze_params_name_list and train.only_train_params_name_list leave no parameter to train; drop one"
        )
    return trainable
