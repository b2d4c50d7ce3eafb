"""Escapes keys to names that a tracker accepts, so that the key can be recovered.

A character that is not accepted becomes its code between `_x` and `_`: `a[0]` is `a_x5b_0_x5d_`. If a key contains what
looks like such a code, its underscore is escaped, so that no two keys share a name. Nearly all keys stay as they are.
"""

import re

_INSIDE = "x(?:([0-9a-f]+)|inf|nonfinite|)"  # the words belong to suffixes that loggers add
_CODE = re.compile(f"_{_INSIDE}_")

MARK = "_x_"  # the code of nothing, which makes another name for the same key
INFINITE = "_xinf_"
NONFINITE = "_xnonfinite_"
SURROGATES = "\ud800-\udfff"  # half characters, which clients drop or refuse


def escape(name: str, bad: str = "", mark: bool = False) -> str:
    """Escape the characters in `bad`, the inside of a regular expression's brackets.

    >>> escape("a[0]", "^a-z0-9"), escape("grad_norm"), escape("_x5b_"), escape("")
    ('a_x5b_0_x5d_', 'grad_norm', '_x5f_x5b_', '_x_')

    Args:
        name: Any text.
        bad: Which characters to escape.
        mark: Whether to add a mark, because the name is taken.
    """
    if not name:
        return MARK
    bad = f"[{bad}]" if bad else "(?!)"
    # The last underscore of what looks like a code may be the first one of the next code. The end of the name counts
    # as an underscore too, because loggers add suffixes.
    return re.sub(f"_(?={_INSIDE}(?:_|{bad}|$))|{bad}", lambda m: f"_x{ord(m[0]):x}_", name) + MARK * mark


def unescape(name: str) -> str:
    """Return the key that has this name, with or without a suffix.

    >>> unescape("a_x5b_0_x5d_"), unescape("grad_norm"), unescape("loss_xinf_")
    ('a[0]', 'grad_norm', 'loss')
    """
    return _CODE.sub(lambda code: chr(int(code[1], 16)) if code[1] else "", name)
