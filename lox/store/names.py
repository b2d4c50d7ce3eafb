"""The names of runs.

A run is identified by its PRNG key, and `base_name` gives no two PRNG keys the same text: `jax.random.key(42)` is `42`.
What people see is its name (`of_runs`): short, unique in a directory, and safe as the name of a file.
"""

import itertools
import re
import urllib.parse
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lox import _errors

DEFAULT_IMPL = "threefry2x32"
UNNAMED = "run"  # the base name of runs without a PRNG key
_LARGEST_SEED = 10**12  # of 2**64 PRNG keys
_MOST_VALUES = 4  # of hyper-parameters in a name
_LONGEST = 120  # bytes of a name; file systems allow 255, and suffixes follow

# Raw PRNG keys (`jax.random.PRNGKey`) do not have their implementation, but their length tells it.
_IMPL_OF_LENGTH = {2: DEFAULT_IMPL, 4: "rbg"}


def is_raw(data: Any) -> bool:
    """Tell whether an array of words has the shape of raw PRNG keys."""
    return np.ndim(data) > 0 and np.shape(data)[-1] in _IMPL_OF_LENGTH


def impl_of_raw(data: Any) -> str:
    """Return the implementation of a raw PRNG key, an array of words."""
    if not is_raw(data):
        raise ValueError(f"a PRNG key has 2 or 4 words, not {np.shape(data)[-1] if np.ndim(data) else 0}.")
    return _IMPL_OF_LENGTH[np.shape(data)[-1]]


def base_name(key_data: Any, impl: str | None = None) -> str:
    """Return the name of the first run with this PRNG key, given as its words.

    >>> from lox.store import names
    >>> names.base_name([0, 42])
    '42'
    >>> names.base_name([0, 42, 0, 42], "rbg")
    'rbg-42'
    >>> names.base_name([1, 2, 3, 4], "rbg")
    'rbg-x00000001000000020000000300000004'
    """
    words = [int(w) for w in np.asarray(key_data, np.uint32).ravel()]
    # Implementations can be registered under any name, so they are quoted: no slashes, and no two become the same.
    impl = urllib.parse.quote(impl or impl_of_raw(words), safe="")
    if len(words) == 2 and impl == DEFAULT_IMPL:
        return str(_number(words))
    if len(words) == 4 and words[:2] == words[2:]:  # made from a seed
        return f"{impl}-{_number(words[:2])}"
    return f"{impl}-x{''.join(f'{w:08x}' for w in words)}"


def base_names(key_data: Any, impl: str | None = None) -> list[str]:
    """Return the `base_name` of every PRNG key of an array."""
    data = np.asarray(key_data, np.uint32)
    return [base_name(words, impl) for words in data.reshape(-1, data.shape[-1])]


def of_runs(
    key_data: Any, impl: str | None = None, configs: Sequence[Any] | None = None, template: str | None = None
) -> list[str]:
    """Return names that tell the runs of one `init` apart, given the words of their PRNG keys and their configs.

    Runs that have the same PRNG key and the same config get the same name; `Taken` numbers them.

    >>> from lox.store import names
    >>> names.of_runs([[0, 42]])
    ['42']
    >>> names.of_runs([[0, 1], [0, 2]], configs=[{"lr": 0.1, "depth": 3}, {"lr": 0.01, "depth": 3}])
    ['1 lr=0.1', '2 lr=0.01']
    >>> names.of_runs([[123, 456], [789, 123]])
    ['lane0', 'lane1']
    >>> names.of_runs([[0, 1], [0, 2]], configs=[{"lr": 0.1}, {"lr": 0.01}], template="lr={lr:g}")
    ['lr=0.1', 'lr=0.01']

    Args:
        key_data: An array `(run, words)`.
        impl: The implementation of the PRNG keys.
        configs: A dict of hyper-parameters for each run.
        template: The name, with fields of the config as in `str.format`; and `{key}` and `{lane}`.
    """
    data = np.asarray(key_data, np.uint32)
    configs = [config if isinstance(config, Mapping) else {} for config in configs or [{}] * len(data)]
    bases, seeds = base_names(data, impl), [_is_seed(words) for words in data.tolist()]
    shorts = [base if seed else f"x{zlib.crc32(base.encode()):08x}" for base, seed in zip(bases, seeds, strict=True)]
    if template is not None:
        lanes = enumerate(zip(shorts, configs, strict=True))
        wanted = [render(template, config, short, lane) for lane, (short, config) in lanes]
    elif len(data) == 1:
        wanted = shorts
    else:
        digits = len(str(len(data) - 1))
        numbers = shorts if all(seeds) else [f"lane{lane:0{digits}}" for lane in range(len(data))]
        rests = _what_differs(configs, numbers)
        wanted = [" ".join([number, *rest]) for number, rest in zip(numbers, rests, strict=True)]
    return [safe(name) for name in wanted]


def _is_seed(words: Sequence[int]) -> bool:
    """Tell whether a PRNG key is made from a seed, and not by splitting another."""
    return _number(words) < _LARGEST_SEED and (len(words) == 2 or (len(words) == 4 and words[:2] == words[2:]))


def _what_differs(configs: Sequence[Mapping[str, Any]], numbers: Sequence[str]) -> list[list[str]]:
    """Return, for each run, the values of a few hyper-parameters that are not the same for all, nor their numbers."""
    flat = [dict(_scalars(config)) for config in configs]
    differing = [path for path in flat[0] if any(path not in f or f[path] != flat[0][path] for f in flat)]
    differing = [p for p in differing if any(f.get(p) != number for f, number in zip(flat, numbers, strict=True))]
    differing = differing[:_MOST_VALUES]
    ends = [path.rpartition(".")[2] for path in differing]
    titles = {path: path if ends.count(end) > 1 else end for path, end in zip(differing, ends, strict=True)}
    return [[f"{titles[path]}={f[path]}" for path in differing if path in f] for f in flat]


def _scalars(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:g}"
        elif value is None or isinstance(value, bool | int | str):
            yield f"{prefix}{key}", str(value)


class _Fields(dict[str, Any]):
    """A config in a template, where `{optimizer.lr}` is as good as `{optimizer[lr]}`."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return _Fields(value) if isinstance(value, Mapping) else value


def render(template: str, config: Mapping[str, Any], key: str, lane: int) -> str:
    """Return the name that a template gives to a run."""
    if not isinstance(template, str):
        raise _errors.LogTypeError(f"`name` is {template!r}; it must be a string.")
    try:
        return template.format(**{"key": key, "lane": lane, **_Fields(config), **_nested(config)})
    except (KeyError, IndexError, AttributeError) as error:
        known = _errors.listing([*config, "key", "lane"])
        raise _errors.LogTypeError(f"`name` is {template!r}, but there is no {error}. There are {known}.") from None
    except (ValueError, TypeError) as error:
        raise _errors.LogTypeError(f"`name` is {template!r}, which does not fit the config: {error}.") from None


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _Fields(value) for key, value in config.items() if isinstance(value, Mapping)}


def safe(name: str) -> str:
    """Return a name that every file system accepts and every shell shows; a long one ends with a checksum."""
    name = re.sub(r"[^\w .=+,@()~-]", "_", name).strip(" .") or UNNAMED
    if re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name):
        name = f"_{name}"  # names of devices in Windows
    encoded = name.encode(errors="replace")
    if len(encoded) <= _LONGEST:
        return encoded.decode()
    return f"{encoded[: _LONGEST - 9].decode(errors='ignore')}~{zlib.crc32(encoded):08x}"


class Taken:
    """Names that are taken. Further runs of a name are `42.1`, `42.2`, ..., or `lr=0.1 (2)`, `lr=0.1 (3)`."""

    def __init__(self, names: Iterable[str] = (), also: Container[str] = ()):
        self.names = set(names)
        self._also, self._freed = also, set[str]()
        self._tried: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names or (name in self._also and name not in self._freed)

    def free(self, names: Iterable[str]) -> None:
        """Let these names be taken again."""
        freed = set(names)
        self.names -= freed
        self._freed |= freed

    def take(self, name: str) -> str:
        """Return the first name like this that is free, and take it."""
        free = name
        if name in self:
            free, number = next(
                (numbered, n)
                for n in itertools.count(self._tried.get(name, 0) + 1)
                if (numbered := attempt(name, n)) not in self
            )
            self._tried[name] = number
        self.names.add(free)
        return free


def attempt(name: str, number: int) -> str:
    """Return the name of a further attempt, counted from 1."""
    return f"{name} ({number + 1})" if "=" in name else f"{name}.{number}"  # not lr=0.5.1


def to_resume(wanted: Sequence[str], seeds: Sequence[str], existing: Iterable[str]) -> list[str | None]:
    """Choose the run to go on with for each of these names: its newest attempt, or None if there is none.

    Runs that are resumed together were begun together: of several with one name, the last lane gets the newest. If the
    config has changed, and the name with it, a run counts that begins with the same seed, if it is the only one.

    >>> from lox.store import names
    >>> names.to_resume(["42", "7 lr=0.5", "8"], ["42", "7", "8"], ["42", "42.1", "7 lr=0.1", "7 lr=0.1 (2)"])
    ['42.1', '7 lr=0.1 (2)', None]

    Args:
        wanted: The names, from `of_runs`.
        seeds: The names of the PRNG keys alone.
        existing: The names of the runs there are.
    """
    attempts: dict[str, list[tuple[int, str]]] = {}
    exact = {*wanted}
    for name in existing:
        title, number = (name, 0) if name in exact else _title_and_attempt(name)
        attempts.setdefault(title, []).append((number, name))
    left = {title: sorted(numbered) for title, numbered in attempts.items()}
    chosen: list[str | None] = []
    for title, seed in reversed([*zip(wanted, seeds, strict=True)]):
        if title not in attempts and title.split(" ")[0] == seed:
            same = [other for other in attempts if other.split(" ")[0] == seed and other not in exact]
            title = same[0] if len(same) == 1 else title
        chosen.append(left[title].pop()[1] if left.get(title) else None)
    return chosen[::-1]


def _title_and_attempt(name: str) -> tuple[str, int]:
    """Undo `attempt`; the first run of a name has the number 0."""
    if match := re.fullmatch(r"(.*=.*) \((\d+)\)", name):
        return match[1], int(match[2]) - 1
    match = re.fullmatch(r"([^=]+)\.(\d+)", name)
    return (match[1], int(match[2])) if match else (name, 0)


def title(name: str) -> str:
    """Return the name of the first attempt: `42` for `42.1`."""
    return _title_and_attempt(name)[0]


def _number(words: Sequence[int]) -> int:
    return words[0] << 32 | words[1]
