"""Arguments that are `True` or `False`."""

from __future__ import annotations

from typing import Any

from geneva.errors import UserInputError


def check_flag(name: str, value: Any, error: type[UserInputError] = UserInputError) -> bool:
    """Refuse what is neither `True` nor `False`: the text "no" would count as yes."""
    if not isinstance(value, bool):  # no bool of numpy's either, of which nothing `is True`
        raise error(f"{name} must be True or False, not {value!r}.")
    return value
