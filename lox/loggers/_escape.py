"""Names that a tracker accepts, from which the key can be read again.

A character that is not accepted becomes its code between `_x` and `_`: `a[0]` is `a_x5b_0_x5d_`. What looks like such
a code in a key has its underscore escaped, so that no two keys share a name. All other keys, which are nearly all, stay
as they are.
"""

import re

_CODE = re.compile(r"_x([0-9a-f]*)_")
_LOOKS_LIKE_CODE = "x(?:[0-9a-f]*|inf|nonfinite)"  # the words are suffixes that loggers add

MARK = "_x_"  # the code of nothing: makes another name for the same key
INFINITE = "_xinf_"
NONFINITE = "_xnonfinite_"


def escape(name: str, bad: str = "", mark: bool = False) -> str:
    """The name without the characters in `bad`, the inside of a regular expression's brackets.

    >>> escape("a[0]", "^a-z0-9"), escape("grad_norm"), escape("_x5b_"), escape("")
    ('a_x5b_0_x5d_', 'grad_norm', '_x5f_x5b_', '_x_')

    Args:
        name: Any text.
        bad: Which characters to escape.
        mark: Whether to add a mark, for a name that is taken otherwise.
    """
    if not name:
        return MARK
    bad = f"[{bad}]" if bad else "(?!)"
    # The second underscore of what looks like a code may also be the first one of the code that follows. Suffixes that
    # loggers add follow too, so the end of the name counts.
    return re.sub(f"_(?={_LOOKS_LIKE_CODE}(?:_|{bad}|$))|{bad}", lambda m: f"_x{ord(m[0]):x}_", name) + MARK * mark


def unescape(name: str) -> str:
    """The key that has this name.

    >>> unescape("a_x5b_0_x5d_"), unescape("grad_norm")
    ('a[0]', 'grad_norm')
    """
    return _CODE.sub(lambda m: chr(int(m[1], 16)) if m[1] else "", name)
